"""Tensors that are made of the values of other tensors when they are read, such as a part, or rows reordered.

Memory beside what is asked for is that of one head's rows at most.
"""

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorSection:
    """A run of values of another tensor; a `TensorSource`."""

    source: TensorSource
    first: int
    spec: TensorSpec

    def fill(self, first: int, into: "torch.Tensor") -> None:
        self.source.fill(self.first + first, into)


@dataclass(frozen=True)
class ValueRange:
    """`count` consecutive values of a tensor, beginning with value `first`."""

    source: TensorSource
    first: int
    count: int


@dataclass(frozen=True)
class Joined:
    """Runs of values, one after the other; a `TensorSource`. All have the data type that `spec` names."""

    runs: tuple[ValueRange, ...]
    spec: TensorSpec

    @classmethod
    def of(cls, name: str, sources: Iterable[TensorSource], shape: tuple[int, ...]) -> "Joined":
        """Whole tensors, one after the other, as a tensor of the given name and shape."""
        whole = tuple(sources)
        runs = tuple(ValueRange(source, 0, math.prod(source.spec.shape)) for source in whole)
        return cls(runs, TensorSpec(name, whole[0].spec.dtype, shape))

    def fill(self, first: int, into: "torch.Tensor") -> None:
        number = bisect.bisect_right(self._starts, first) - 1
        done = 0
        while done < len(into):
            run, skipped = self.runs[number], first + done - self._starts[number]
            count = min(len(into) - done, run.count - skipped)
            run.source.fill(run.first + skipped, into[done : done + count])
            done, number = done + count, number + 1

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for run in self.runs:
            starts.append(starts[-1] + run.count)
        return starts[:-1]


@dataclass(frozen=True)
class RotaryRows:
    """The rows of queries or keys in the other order of rotary embeddings; a `TensorSource`.

    The hub's files have the first elements of a head's pairs before the second ones; Meta's Llama, and
    formats that follow it, have the elements of a pair side by side.

    source: a weight [heads * head, hidden] or a bias [heads * head]. heads: number of heads in it. to_hub:
    whether the hub's order is made from the other one.
    """

    source: TensorSource
    heads: int
    to_hub: bool

    @property
    def spec(self) -> TensorSpec:
        return self.source.spec

    def fill(self, first: int, into: "torch.Tensor") -> None:
        import torch

        shape = self.spec.shape
        each = math.prod(shape) // self.heads
        half = shape[0] // self.heads // 2
        pairs = (half, 2) if self.to_hub else (2, half)
        block = torch.empty(each, dtype=into.dtype)
        for head in range(first // each, -(-(first + len(into)) // each)):
            self.source.fill(head * each, block)
            ordered = block.view(*pairs, -1).transpose(0, 1).reshape(-1)
            low, high = max(head * each, first), min((head + 1) * each, first + len(into))
            into[low - first : high - first] = ordered[low - head * each : high - head * each]
