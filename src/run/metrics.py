"""`metrics.jsonl`: one row per optimiser step, each step once; and the early stopping that reads it."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cairn.run.jsonlines import JsonLines, as_object

CHAIN = "rows/digest"
"""The column with a digest of the row and of the one before it, so that a row that was altered is noticed."""
CHAINED = (
    *("step", "loss", "lr", "grad_norm", "learned_tokens", "epoch", "batch/digest"),
    *("total_tokens", "total_samples", "total_records", "dropped_records"),
)
"""What it is made of: columns that are the same in a run that was killed and resumed."""
VALIDATED = re.compile(r"validation/([^/]+)/loss")
EVALUATED = re.compile(r"eval/([^/]+)/step")


def chained(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """The digest of a row and the one before it; None if there is none, or it has no digest."""
    earlier = (before or {}).get(CHAIN) or ""
    content = json.dumps([earlier, {key: row.get(key) for key in CHAINED}], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


class Undone(NamedTuple):
    """What is done again: finished steps, and the tokens that they had trained on."""

    steps: int
    tokens: int


class MetricsLog(JsonLines):
    """The metrics of a run, in the order of steps; each row holds the key `step`."""

    def is_row(self, value: Any) -> bool:
        """Whether it says which step it is of."""
        return type(as_object(value).get("step")) is int

    def keep_through(self, step: int) -> Undone:
        """Drop the rows after `step`: the run goes on from there and writes them again."""
        tokens = sum(count_of(row, "learned_tokens") for row in self.rows() if row["step"] > step)
        return Undone(self.drop(lambda row: row["step"] <= step), tokens)


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A row's value, if it is a number."""
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def count_of(row: Mapping[str, Any], key: str) -> int:
    """A row's value, if it is a count; 0 otherwise."""
    value = number(row, key)
    return int(value) if value is not None and 0 <= value < math.inf else 0


def ranges_of(steps: Iterable[int]) -> str:
    """Steps for people, such as `3, 5 to 8`."""
    found: list[list[int]] = []
    for step in sorted(set(steps)):
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in found)


def lost(rows: Iterable[Mapping[str, Any]], evals: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The steps whose results are in the rows of metrics.jsonl and not in evals.jsonl, by name.

    A row of SFT has the results of its own step, one of RL those of a policy whose evaluation ended then.
    """
    there = {(row.get("name"), row.get("step")) for row in evals}
    found: dict[str, set[int]] = {}
    for row in rows:
        for key, value in row.items():
            if match := VALIDATED.fullmatch(key):
                name, step = match[1], row["step"]
            elif match := EVALUATED.fullmatch(key):
                name, step = match[1], int(value)
            else:
                continue
            if (name, step) not in there:
                found.setdefault(name, set()).add(step)
    return {name: sorted(steps) for name, steps in found.items()}


# Early stopping: the best result of each validation, and whether a run waits for a better one.


def better(best: Mapping[str, float] | None, step: int, loss: float) -> dict[str, float]:
    """The best result so far with this one: its `loss` and `step`, and how many came `since`."""
    if best is None or loss < best["loss"]:
        return {"loss": loss, "step": step, "since": 0}
    return {**best, "since": best["since"] + 1}


def why_exhausted(best: Mapping[str, Mapping[str, float]], patiences: Mapping[str, int]) -> str | None:
    """Why a run ends before its last step: a validation's loss falls no more. None if it does not.

    Args:
        best: the best result of each validation, as checkpoints hold it.
        patiences: of the validations that may end the run.
    """
    for name, patience in patiences.items():
        found = best.get(name)
        if found and found["since"] >= patience:
            return (
                f"validation {name!r} had its lowest loss, {found['loss']:.5g}, after step "
                f"{int(found['step'])}, and none lower in the {int(found['since'])} since then "
                f"(patience = {patience})"
            )
    return None
