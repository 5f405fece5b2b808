"""Which schedule of transformers gave the learning rates that a checkpoint of Trainer has on record."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

CLOSE = 1e-9
"""Relative difference of two rates that are the same but for the order of computation."""
KINDS = ("constant", "linear", "cosine")
MAX_STEPS = 1_000_000
"""A schedule with more is not looked for: each possible warm-up takes memory."""
Rates = Mapping[int, float]
"""Learning rates, as parts of the peak, by the number of steps before; transformers calls it `last_epoch`."""


def schedule_of(logged: Iterable[Mapping[str, Any]], upcoming: float, step: int, end: int) -> dict[str, Any]:
    """Cairn's settings of the schedule that fits all rates, if one schedule alone does; else nothing.

    Trainer's step s has the rate that Cairn's step s + 1 would have with the same numbers, so warm-up and end
    are one step later here. From the end of the warm-up on, the rates are then the same.

    Args:
        logged: the entries of log_history; those with `learning_rate` and `step` count. Older versions of
            Trainer logged the next step's rate, which is tried as well. Rates are parts of the peak.
        upcoming: the rate of the step after `step`, as a part of the peak.
        end: the step at which the schedule arrives.
    """
    if not 0 < step <= end <= MAX_STEPS:
        return {}
    own = {
        int(entry["step"]): float(entry["learning_rate"])
        for entry in logged
        if isinstance(entry.get("step"), int) and isinstance(entry.get("learning_rate"), (int, float))
    }
    found: set[tuple[str, int]] = set()
    for shift in (1, 0):
        rates = {at - shift: rate for at, rate in own.items() if at - shift >= 0}
        if rates.setdefault(step, upcoming) == upcoming:
            found |= {(kind, warmup) for kind in KINDS for warmup in _warmups(kind, rates, end)}
    if any(kind == "constant" and warmup <= step for kind, warmup in found):
        found = {(kind, 0 if kind == "constant" else warmup) for kind, warmup in found}
    if len(found) != 1:
        return {}
    ((kind, warmup),) = found
    if kind == "constant":
        return {"scheduler.type": kind}
    return {
        "scheduler.type": kind,
        "scheduler.warmup_steps": warmup + 1,
        "scheduler.steps": end + 1,
        "scheduler.min_lr_ratio": 0.0,
    }


def _warmups(kind: str, rates: Rates, end: int) -> Collection[int]:
    """The lengths of the warm-up with which a kind of schedule gives these rates."""
    warmups = np.arange(end + 1)
    for before, rate in rates.items():
        rising = before / np.maximum(warmups, 1)
        done = np.clip((before - warmups) / np.maximum(end - warmups, 1), 0.0, 1.0)
        falling = {
            "constant": np.ones(len(warmups)),
            "linear": 1 - done,
            "cosine": (1 + np.cos(np.pi * done)) / 2,
        }[kind]
        expected = np.where(before < warmups, rising, falling)
        warmups = warmups[np.abs(expected - rate) <= CLOSE * np.maximum(expected, CLOSE)]
    return [int(warmup) for warmup in warmups]
