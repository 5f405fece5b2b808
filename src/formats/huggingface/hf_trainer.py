"""The checkpoint-N folders of transformers' Trainer (and TRL): weights, AdamW's state, and step."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.common.adamw import STATE as ADAMW
from cairn.formats.common.adamw import settings_of
from cairn.formats.huggingface.hf_trainer_groups import (
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    STATE,
    decaying_otherwise,
    groups_of,
    state_by_name,
)
from cairn.formats.huggingface.huggingface import weights_in
from cairn.run.files import read_json

LEFT_OUT = {
    "rng_state": "Cairn seeds every draw anew, from the run's seed and the step",
    "training_args.bin": "it is a pickle of classes, which is never loaded",
    "scaler.pt": "Cairn needs no loss scaling",
}


@dataclass(frozen=True)
class HFTrainerState:
    """What is read of trainer_state.json."""

    global_step: int
    max_steps: int = 0
    epoch: float | None = None
    train_batch_size: int | None = None
    num_input_tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class HuggingFaceTrainer:
    """Trainer's folder on one process, or of data-parallel ones; not that of FSDP or DeepSpeed."""

    stems = (MODEL, OPTIMIZER)

    def detect(self, source: Path) -> bool:
        return (source / STATE).exists()

    def read(self, source: Path, model: Path | None = None) -> Content:
        progress = read_json(source / STATE, HFTrainerState)
        if progress is None:
            raise FileNotFoundError(2, "no such file", str(source / STATE))
        state, settings, notes = _read_optimizer(source, model or source)
        schedule, said = _read_schedule(source, progress)
        passed_over = [
            f"{path.name}: {why}"
            for path in sorted(source.iterdir())
            for name, why in LEFT_OUT.items()
            if path.name.startswith(name)
        ]
        return Content(
            {MODEL: weights_in(source), OPTIMIZER: state},
            model=model or source,
            step=progress.global_step,
            tokens=progress.num_input_tokens_seen or None,
            optimizer="AdamW",
            settings=settings | schedule,
            left_out=(*passed_over, *notes, *said, _position(source, progress)),
        )

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.common.verified_reads import KeptValues  # imports torch
        from cairn.formats.huggingface.hf_trainer_writer import write  # imports torch

        kept = KeptValues(content, options.dtype)
        write(kept.content, folder, options)
        return kept.read_back(self, folder)


def _read_optimizer(
    source: Path, model: Path
) -> tuple[dict[str, TensorSource], dict[str, Any], tuple[str, ...]]:
    """AdamW's state by transformers' names, the settings in its groups, and what is left out of these.

    Args:
        model: has the model's config.json.
    """
    from cairn.formats.torch_file.pickled import load_pickled

    path = source / OPTIMIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{source}: has no {OPTIMIZER_FILE}; its weights alone are imported with --format hf"
        )
    content = load_pickled(path)
    try:
        groups, states = content["param_groups"], content["state"]
        numbers = [number for group in groups for number in group["params"]]
        known = set(numbers)
        settings = _settings(groups, path)
        kinds = {kind for state in states.values() for kind in state.keys()}  # noqa: SIM118 # which must be a dictionary
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path}: holds no state of an optimiser ({error!r})") from None
    if kinds != set(ADAMW):
        raise CheckpointError(f"{path}: has {', '.join(sorted(map(str, kinds)))}, not the state of AdamW")
    decaying, others = groups_of(model)
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(decaying), len(others)]:
        raise CheckpointError(
            f"{path}: has groups of {sizes} weights; Trainer makes one with weight decay, here of "
            f"{len(decaying)}, and one of the other {len(others)}; all weights must have been trained"
        )
    order = decaying | others
    if known != set(states):
        raise CheckpointError(
            f"{path}: has the state of {len(states)} of {len(numbers)} weights; all must have been trained"
        )
    notes = ()
    if settings.get("optimizer.weight_decay") and (wrong := decaying_otherwise(decaying, others)):
        notes = (f"the weight decay of {listed(wrong)}, or that they have none: Cairn decays all matrices",)

    def misfit(number: Any, found: list[int], name: str, shape: list[int]) -> str:
        return (
            f"{path}: the state of weight {number} has shape {found}, and {name}, which should be that, has "
            f"{shape}"
        )

    return state_by_name(order, numbers, states, path, misfit), settings, notes


def _settings(groups: Collection[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """The settings that groups of AdamW have; the rate is that at the schedule's top."""
    found = settings_of(groups, path)
    return {
        name: [float(each) for each in value] if isinstance(value, (list, tuple)) else float(value)
        for name, value in found.items()
    }


def _read_schedule(source: Path, progress: HFTrainerState) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of the schedule, and what has to be said of it.

    Trainer does not store which schedule it was, but the rates that it gave.
    """
    from cairn.formats.torch_file.pickled import load_pickled

    path = source / SCHEDULER_FILE
    try:
        content = load_pickled(path)
        peak, upcoming = float(content["base_lrs"][0]), float(content["_last_lr"][0])
    except FileNotFoundError:
        return {}, ()
    except (Damaged, LookupError, TypeError, ValueError):
        return {}, (f"{path.name}: it holds no rates that can be read; give the run the same schedule",)
    if peak <= 0:
        return {}, (f"{path.name}: its peak is {peak}; give the run the same schedule",)
    logged = [
        {**entry, "learning_rate": entry["learning_rate"] / peak}
        for entry in progress.log_history
        if isinstance(entry.get("learning_rate"), (int, float))
    ]
    found = schedule_of(logged, upcoming / peak, progress.global_step, progress.max_steps)
    if found:
        return found, ()
    return {}, (
        f"{path.name}: which schedule it is of can't be told from its rates; the next one was {upcoming:g}, "
        f"with a peak of {peak:g} and {progress.max_steps} steps in all: give the run the same schedule",
    )


def _position(source: Path, progress: HFTrainerState) -> str:
    """What is known of the position in the data."""
    ranks = len(list(source.glob("rng_state*.pth")))
    known = [f"step {progress.global_step}"]
    known += [] if progress.epoch is None else [f"epoch {progress.epoch:g}"]
    if progress.train_batch_size:
        known += [
            f"{progress.train_batch_size} records at a time" + (f" on {ranks} ranks" if ranks > 1 else "")
        ]
    return f"the position in the data ({', '.join(known)}): Cairn begins the data anew, in its own order"


# Which schedule of transformers gave the learning rates that a checkpoint of Trainer has on record.


CLOSE = 1e-9
"""Relative difference of two rates that are the same but for the order of computation."""
SCHEDULES = ("constant", "linear", "cosine")
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
            found |= {(kind, warmup) for kind in SCHEDULES for warmup in _warmups(kind, rates, end)}
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
    import numpy as np

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
