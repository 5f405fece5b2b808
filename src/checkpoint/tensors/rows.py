"""Tensors as they are written and read best: in rows, and their values together.

A tensor that is cut into very many short ranges is redistributed, so that it is written and read by rows.
If each rank holds a few columns of a matrix, every row is a range of its own: a system call and a
checksum for every few bytes, and a list as long as the matrix. For such tensors the ranks exchange values
so that each holds whole rows, which are one range. This takes memory for a second copy of those shards
until they are copied, and communication on the calling thread. Shards on dimension 0 never need it.

Values that lie in several places (`Scattered`) are copied into one, for as long.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from cairn.checkpoint.tensors.placement import (
    Made,
    Scattered,
    Section,
    Stored,
    count_ranges,
    ranges_of,
)

FEW_RANGES = 1024
"""A tensor with at most this many ranges is never exchanged."""
SHORT_BYTES = 16 << 10
"""A tensor with more ranges is exchanged if they are shorter than this on average."""


def in_rows(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same values: redistributed to rows where ranges are many and short, and together where they lie in
    several places. All ranks call it together."""
    return _replaced(tensors, _exchanged, lambda tensor: tensor.together(tensor.gathered()))


class RowTargets:
    """Targets to read in place of `tensors`: rows for those with many short ranges, and one place for the
    values that lie in several."""

    def __init__(self, tensors: Mapping[str, Stored]):
        self._made: list[tuple[DTensor, DTensor]] = []
        self._joined: list[tuple[Scattered, torch.Tensor]] = []
        self.tensors = _replaced(tensors, self._blank, self._join)

    @property
    def exchanged(self) -> bool:
        """Whether there are any such tensors."""
        return bool(self._made or self._joined)

    def finish(self) -> None:
        """Bring what was read into the tensors themselves. All ranks call it together."""
        with torch.no_grad():
            for scattered, joined in self._joined:
                parts = joined.split([len(piece.values) for piece in scattered.pieces])
                for piece, values in zip(scattered.pieces, parts, strict=True):
                    piece.values.copy_(values)
            for tensor, rows in self._made:
                values = rows.redistribute(tensor.device_mesh, tensor.placements)
                tensor.to_local().copy_(values.to_local())

    def _join(self, tensor: Scattered) -> Scattered:
        count = sum(len(piece.values) for piece in tensor.pieces)
        joined = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
        self._joined.append((tensor, joined))
        return tensor.together(joined)

    def _blank(self, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        rows = _blank_rows(tensor, placements)
        self._made.append((tensor, rows))
        return rows


def _blank_rows(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """A tensor like `tensor` with other placements and undefined values."""
    mesh = tensor.device_mesh
    at = mesh.get_coordinate() or [0] * mesh.ndim
    ranges = ranges_of(tuple(tensor.shape), placements, tuple(mesh.shape), at)
    rest = tensor.shape[1:]
    count = sum(count for _, count in ranges) // max(rest.numel(), 1)
    local = torch.empty((count, *rest), dtype=tensor.dtype, device=tensor.device)
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)


def _exchanged(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    with torch.no_grad():
        return tensor.redistribute(tensor.device_mesh, placements)


def _row_placements(tensor: DTensor) -> tuple[Placement, ...] | None:
    """The placements that give each rank whole rows; None if the ranges are few, or long enough already."""
    if all(placement.is_replicate() or placement == Shard(0) for placement in tensor.placements):
        return None
    shape, mesh_shape = tuple(tensor.shape), tuple(tensor.device_mesh.shape)
    ranges, count = count_ranges(shape, tensor.placements, mesh_shape)
    if ranges <= FEW_RANGES or count * tensor.element_size() >= ranges * SHORT_BYTES:
        return None
    return tuple(placement if placement.is_replicate() else Shard(0) for placement in tensor.placements)


def _replaced(
    tensors: Mapping[str, Stored],
    make: Callable[[DTensor, tuple[Placement, ...]], DTensor],
    join: Callable[[Scattered], Scattered],
) -> dict[str, Stored]:
    """The tensors, with those in many short ranges replaced by the result of `make`, and those in several
    places by that of `join`; each is called once for each tensor."""
    made: dict[int, DTensor | Scattered] = {}

    def replace(tensor: torch.Tensor | Made | Scattered) -> torch.Tensor | Made | Scattered:
        if isinstance(tensor, Scattered) and len(tensor.pieces) > 1:
            if id(tensor) not in made:
                made[id(tensor)] = join(tensor)
            return made[id(tensor)]
        placements = _row_placements(tensor) if isinstance(tensor, DTensor) else None
        if placements is None:
            return tensor
        assert isinstance(tensor, DTensor)
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor, placements)
        return made[id(tensor)]

    replaced: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Section):
            whole = replace(tensor.tensor)
            same = whole is tensor.tensor
            replaced[name] = tensor if same else Section(whole, tensor.first, tuple(tensor.shape))
        else:
            replaced[name] = replace(tensor)
    return replaced
