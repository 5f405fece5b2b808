"""Compares steps that were taken twice: rows of metrics, and every weight and moment, bit by bit."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cairn.checkpoint.manifest import load_manifest
from cairn.checkpoint.step_folder import (
    ADAPTER,
    CRITIC,
    CRITIC_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    StepFolder,
    verify,
)
from cairn.checkpoint.tensors.layout import StoredTensor
from cairn.run.jsonlines import Row
from cairn.run.metrics import CHAINED, number
from cairn.run.output import Stage, no_progress

if TYPE_CHECKING:
    import torch

STEMS = (MODEL, ADAPTER, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER)
"""Everything of a checkpoint that has tensors."""
COMPUTED = ("loss", "grad_norm")
"""The columns that depend on how sums are rounded."""
SHOWN = 3
"""So many of a tensor's values are shown that differ."""

Verdict = Literal["same", "close", "other"]
"""To the bit; within the bound; neither."""


def first_of(found: Sequence[object], top: int, rest: str) -> list[str]:
    """A line for each of the first `top` differences, and one that says how many are left: of `rest`."""
    left = len(found) - top
    return [f"  {one}" for one in found[:top]] + ([f"  and {left} {rest}"] if left > 0 else [])


@dataclass(frozen=True)
class RowDifference:
    """A column of metrics.jsonl that differs."""

    step: int
    column: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"step {self.step}: {self.column} was {self.was!r} and is {self.now!r}"


@dataclass(frozen=True)
class Value:
    """A value that differs: where, and as which bits.

    place: index of the value in its tensor. bits: the bits that differ, counted from the lowest.
    """

    place: tuple[int, ...]
    was: float
    now: float
    bits: tuple[int, ...]

    def __str__(self) -> str:
        flipped = f"bit {self.bits[0]} flipped" if len(self.bits) == 1 else f"{len(self.bits)} bits differ"
        return f"{list(self.place)}: {self.was!r} -> {self.now!r} ({flipped})"


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs.

    changed: how many of its `values` do. distance: the norm of the difference, over that of what the steps
    have changed in the tensor, or over its own if nothing is known of that. first: the first such values.
    """

    name: str
    values: int
    changed: int
    distance: float
    first: tuple[Value, ...] = ()

    def __str__(self) -> str:
        what = f"{self.name}: {self.changed} of {self.values} values differ, by {self.distance:.2g} of what "
        places = f"; {'; '.join(map(str, self.first))}" if self.changed <= SHOWN else ""
        return f"{what}these steps change{places}"


@dataclass
class Comparison:
    """What came out of two passes over the same steps.

    tensors: how many were compared; 0 if one side has no checkpoint of the last step. problem: what keeps
    them from being compared.
    """

    rows: list[RowDifference] = field(default_factory=list)
    tensors: int = 0
    differing: list[TensorDifference] = field(default_factory=list)
    problem: str | None = None

    def verdict(self, bound: float) -> Verdict:
        """Whether the passes agree; `bound` is the largest relative difference that counts as close."""
        if self.problem:
            return "other"
        if not self.rows and not self.differing:
            return "same"
        computed = all(row.column in COMPUTED and _relative(row.was, row.now) <= bound for row in self.rows)
        near = all(tensor.distance <= bound for tensor in self.differing)
        return "close" if computed and near else "other"

    @property
    def largest(self) -> float:
        """The largest relative difference of all; infinite if what must be equal is not."""
        rows = [_relative(row.was, row.now) if row.column in COMPUTED else math.inf for row in self.rows]
        return max([*rows, *(tensor.distance for tensor in self.differing)], default=0.0)


def _relative(was: Any, now: Any) -> float:
    one, other = number({"": was}, ""), number({"": now}, "")
    if one is None or other is None:
        return math.inf
    return abs(other - one) / abs(one) if one else math.inf


@dataclass(frozen=True)
class RowCause:
    """What rows of metrics that differ say of what was done otherwise, and of which kind that is."""

    kind: Literal["batch", "rate", "computed", "counted"]
    words: str


UPDATED_OTHERWISE = "no row differs, so the last step's update, or the save, did something else"
"""The same of rows that don't, where weights do."""


def cause_of(rows: Sequence[RowDifference]) -> RowCause | None:
    """What the first step says whose row differs; None: no row differs."""
    if not rows:
        return None
    step = min(row.step for row in rows)
    columns = {row.column for row in rows if row.step == step}
    if "batch/digest" in columns:
        return RowCause("batch", f"step {step} was trained on another batch")
    if "lr" in columns:
        return RowCause("rate", f"the learning rate of step {step} was another one")
    if columns & {*COMPUTED}:
        what = f"the batch of step {step} gave another loss or gradient, so the loss, the arithmetic, or the "
        return RowCause("computed", f"{what}weights after step {step - 1} were others")
    return RowCause("counted", f"what is counted of step {step} was something else")


def compare_rows(was: Mapping[int, Row], now: Mapping[int, Row], steps: Iterable[int]) -> list[RowDifference]:
    """The columns that a resumed run repeats to the bit, where they differ; a missing row differs in all."""
    found: list[RowDifference] = []
    for step in steps:
        one, other = was.get(step, {}), now.get(step, {})
        found += [
            RowDifference(step, column, one.get(column), other.get(column))
            for column in CHAINED
            if column != "step" and one.get(column) != other.get(column)
        ]
    return found


def compare_steps(
    was: Path, now: Path, start: Path | None = None, stage: Stage = no_progress
) -> tuple[int, list[TensorDifference]]:
    """How many tensors two checkpoints have, and those that differ.

    Every byte of the first is verified. Tensors are read only if their files' checksums differ.

    Args:
        start: the checkpoint from which the steps were taken.

    Raises:
        CheckpointError: the first is damaged.
    """
    one = verify(was, on_bytes=stage(f"verifying {was.name}", load_manifest(was).nbytes))
    tensors = [_tensors(folder) for folder in (was, now)]
    names = sorted(tensors[0].keys() | tensors[1].keys())
    if one.tensor_files == load_manifest(now).tensor_files:
        return len(names), []
    before = _tensors(start) if start else {}
    progress = stage("comparing tensors", sum(tensor.spec.nbytes for tensor in tensors[0].values()))
    found: list[TensorDifference] = []
    for name in names:
        found += _difference(name, tensors[0].get(name), tensors[1].get(name), before.get(name))
        if name in tensors[0]:
            progress(tensors[0][name].spec.nbytes)
    return len(names), found


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    step = StepFolder(folder)
    named: dict[str, StoredTensor] = {}
    for stem in STEMS:
        named |= {f"{stem}: {name}": tensor for name, tensor in step.tensors(stem).items()}
    return named


def _difference(
    name: str, was: StoredTensor | None, now: StoredTensor | None, before: StoredTensor | None
) -> list[TensorDifference]:
    """The difference of a tensor, if there is one."""
    one = was or now
    assert one is not None
    count = math.prod(one.spec.shape)
    if was is None or now is None or (was.spec.dtype, was.spec.shape) != (now.spec.dtype, now.spec.shape):
        return [TensorDifference(name, count, count, math.inf)]
    from cairn.checkpoint.tensors.sharded_files import pieces  # imports torch

    changed, square = 0, 0.0
    first: list[Value] = []
    for begin, (x, y) in pieces(was, now):
        differs = (_as_bits(x) != _as_bits(y)).nonzero().ravel()
        changed += len(differs)
        square += _square(y.double() - x.double()) if len(differs) else 0.0
        for place in differs[: SHOWN - len(first)].tolist():
            first.append(_value(x[place], y[place], begin + place, was.spec.shape))
    if not changed:
        return []
    moved = 0.0
    if before is not None and before.spec.shape == was.spec.shape:
        moved = sum(_square(x.double() - y.double()) for _, (x, y) in pieces(was, before))
    scale = moved or sum(_square(x.double()) for _, (x,) in pieces(was))
    distance = (square / scale) ** 0.5 if scale else math.inf
    return [TensorDifference(name, count, changed, distance, tuple(first))]


def _as_bits(values: "torch.Tensor") -> "torch.Tensor":
    """Values as whole numbers with the same bits: two NaNs are the same if their bits are."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(sizes[values.element_size()])


def _square(values: "torch.Tensor") -> float:
    return values.nan_to_num(0.0, 0.0, 0.0).square().sum().item()


def _value(was: "torch.Tensor", now: "torch.Tensor", index: int, shape: Iterable[int]) -> Value:
    width = 8 * was.element_size()
    one, other = (int(_as_bits(value.view(1)).item()) for value in (was, now))
    differing = (one ^ other) & ((1 << width) - 1)
    place: list[int] = []
    for size in reversed([*shape]):
        index, inner = divmod(index, size)
        place.append(inner)
    bits = tuple(bit for bit in range(width) if differing >> bit & 1)
    return Value(tuple(reversed(place)), was.item(), now.item(), bits)
