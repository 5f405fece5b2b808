"""The values of a tensor that a rank holds, for any mesh and placements, as ranges of the whole tensor.

The whole tensor's values are counted in row-major order, as in a file. An FSDP2 rank, sharding on dimension
0, holds one range; so does every rank of a replicated tensor. A shard on another dimension is one range per
row, and further mesh dimensions cut these ranges again. Ranks that hold the same ranges divide them: each
writes its own part, and counts it in the checksums when reading.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage] # FSDP2 makes it, and it has no public name
)

Range = tuple[int, int]
"""(first value, number of values)."""
PIECE_BYTES = 1 << 20
"""Ranks that hold the same values divide them in pieces of this size."""


@dataclass(frozen=True)
class Place:
    """A file's tensor in memory: `shape` values of the model's tensor `name`, beginning with item `first`."""

    name: str
    first: int
    shape: tuple[int, ...]


class Section:
    """`shape` contiguous values of a tensor, beginning with item `first`; treated as a tensor of its own.

    Such are the experts of a layer that is one tensor in memory and many in files (`model.hub_layout`).
    """

    def __init__(self, tensor: "torch.Tensor | Made | Scattered", first: int, shape: tuple[int, ...]):
        self.tensor = tensor
        self.first = first
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def numel(self) -> int:
        """Number of values on all ranks together."""
        return self.shape.numel()

    def element_size(self) -> int:
        return self.tensor.element_size()


class Made:
    """A tensor whose values are made when they leave, such as a weight with an adapter added.

    Args:
        like: has its shape and placement.
        dtype: of its values.
        make: this rank's values, as `like` is placed; called on whichever thread writes or sends them.
    """

    def __init__(
        self, like: "torch.Tensor | Scattered", dtype: torch.dtype, make: Callable[[], torch.Tensor]
    ):
        self.like = like
        self.dtype = dtype
        self.make = make
        self.shape = like.shape

    @property
    def device(self) -> torch.device:
        return self.like.device

    def numel(self) -> int:
        """Number of values on all ranks together."""
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize


class HeldPiece(NamedTuple):
    """Some of a tensor's values. ranges: of the whole, ascending. values: theirs, in that order; flat."""

    ranges: tuple[Range, ...]
    values: torch.Tensor


class Scattered:
    """A tensor whose values on this rank lie in several places, as they do where a library has matrices of
    its own that are made of rows of several.

    Args:
        shape: of the whole.
        like: has the data type and the device of the values.
        pieces: ascending, none within another; together what this rank holds.
        copy: (number, of how many) ranks with the same values this is; None: others own the values.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        like: torch.Tensor,
        pieces: Sequence[HeldPiece],
        copy: tuple[int, int] | None = (0, 1),
    ):
        self.shape = torch.Size(shape)
        self.dtype, self.device = like.dtype, like.device
        self.pieces = tuple(pieces)
        self.copy = copy

    def numel(self) -> int:
        """Number of values on all ranks together."""
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Of the whole, ascending."""
        return tuple(itertools.chain.from_iterable(piece.ranges for piece in self.pieces))

    def together(self, values: torch.Tensor) -> "Scattered":
        """The same with `values`, flat, in the place of the pieces'."""
        pieces = [HeldPiece(self.ranges, values)] if self.pieces else []
        return Scattered(tuple(self.shape), values, pieces, self.copy)

    def section(self, first: int, shape: tuple[int, ...]) -> "Scattered":
        """The values of a `Section` of it, in their places, as a tensor of its own."""
        end = first + math.prod(shape)
        pieces: list[HeldPiece] = []
        for piece in self.pieces:
            begin, stop = (_count_before(piece.ranges, item) for item in (first, end))
            if begin < stop:
                pieces.append(HeldPiece(_within(piece.ranges, first, end), piece.values[begin:stop]))
        blank = torch.empty(0, dtype=self.dtype, device=self.device)
        return Scattered(shape, blank, pieces, self.copy)

    def gathered(self) -> torch.Tensor:
        """A copy of the values, flat, in the order of the ranges."""
        blank = torch.empty(0, dtype=self.dtype, device=self.device)
        return torch.cat([piece.values for piece in self.pieces]) if self.pieces else blank


Stored = torch.Tensor | Section | Made | Scattered
"""Whatever is stored as one tensor in a file."""


def made_together(tensor: Stored) -> Stored:
    """The same tensor, whose values are copied into one place when they leave if they lie in several."""
    whole = tensor.tensor if isinstance(tensor, Section) else tensor
    if not isinstance(whole, Scattered):
        return tensor
    one = whole.section(tensor.first, tuple(tensor.shape)) if isinstance(tensor, Section) else whole
    if len(one.pieces) < 2:
        return one
    blank = torch.empty(sum(len(piece.values) for piece in one.pieces), dtype=one.dtype, device="meta")
    like = Scattered(tuple(one.shape), one.pieces[0].values, [HeldPiece(one.ranges, blank)], one.copy)
    return Made(like, one.dtype, one.gathered)


def at_places(
    tensors: Mapping[str, torch.Tensor | Made | Scattered], places: Mapping[str, Place]
) -> dict[str, Stored]:
    """A file's tensors by their names in it; a part of a tensor in memory becomes a section."""
    return {
        name: tensors[place.name]
        if place.shape == tuple(tensors[place.name].shape)
        else Section(tensors[place.name], place.first, place.shape)
        for name, place in places.items()
    }


@dataclass(frozen=True)
class Share:
    """A rank's share of one tensor.

    dtype, shape: of the whole tensor. ranges: the values that the rank holds, in ascending order. local:
    these values, in the order of the ranges once flattened; shares the tensor's memory and may be strided;
    on the meta device if they are made when they leave. own: which of these values this rank, of all that
    hold them, writes and counts. make: as `Made` has it. position: where `local` begins in what is made.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    local: torch.Tensor
    own: Range
    make: Callable[[], torch.Tensor] | None = None
    position: int = 0

    def flat(self) -> torch.Tensor:
        """The values of `local`, flat, in the order of the ranges; made now if they are made at all."""
        if self.make is None:
            return self.local.reshape(-1)
        return self.make().reshape(-1)[self.position : self.position + self.local.numel()]

    def byte_ranges(self) -> list[Range]:
        size = self.dtype.itemsize
        return [(first * size, count * size) for first, count in self.ranges]

    def cut(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each range's first value in the whole, and its part of `flat`, which is as long as `local`."""
        position = 0
        for first, count in self.ranges:
            yield first, flat[position : position + count]
            position += count

    def cut_by_owner(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """Like `cut`, also cut where the rank's own values begin and end; whether each part is its own."""
        position = 0
        for first, values in self.cut(flat):
            length = len(values)
            begin, end = (min(max(at - position, 0), length) for at in (self.own[0], sum(self.own)))
            for start, stop, own in ((0, begin, False), (begin, end, True), (end, length, False)):
                if stop > start:
                    yield first + start, values[start:stop], own
            position += length

    def owned(self) -> "Share":
        """The part that this rank, of all that hold these ranges, writes and counts."""
        begin, count = self.own
        if count == self.local.numel():
            return self
        flat = self.local.reshape(-1)
        ranges = tuple((first, len(values)) for first, values, own in self.cut_by_owner(flat) if own)
        position = self.position + begin
        return replace(
            self, ranges=ranges, local=flat[begin : begin + count], own=(0, count), position=position
        )


def share_of(name: str, tensor: Stored, rank: int) -> Share:
    """This rank's share of `tensor`. Rank 0 owns tensors that are not DTensors, since every rank has them.

    Ranks with copies of the same shard own a part each, so that they save it together.

    Raises:
        NotImplementedError: a placement is neither sharded nor replicated.
    """
    with torch.no_grad():
        local = local_values(tensor).detach()
    whole = tensor.tensor if isinstance(tensor, Section) else tensor
    ranges, copy = _held(whole, rank)
    position = 0
    if isinstance(tensor, Section):
        position = _count_before(ranges, tensor.first)
        ranges = _within(ranges, tensor.first, tensor.first + tensor.numel())
    make = whole.make if isinstance(whole, Made) else None
    own = _own(local, copy)
    return Share(name, tensor.dtype, tuple(tensor.shape), ranges, local, own, make, position)


def _own(local: torch.Tensor, copy: tuple[int, int] | None) -> Range:
    """Which of its values a rank owns that has copy `copy[0]` of `copy[1]`; None: others own them."""
    if copy is None:
        return 0, 0
    number, copies = copy
    if not local.is_contiguous():
        return 0, (0 if number else local.numel())
    each = max(PIECE_BYTES // local.element_size(), 1)
    pieces = -(-local.numel() // each)
    begin, end = (min(pieces * n // copies * each, local.numel()) for n in (number, number + 1))
    return begin, end - begin


def local_values(tensor: Stored) -> torch.Tensor:
    """This rank's values of a tensor, sharing its memory; call it under `torch.no_grad`.

    Of one whose values are made when they leave, a tensor on the meta device.

    Raises:
        NotImplementedError: they lie in several places; see `in_rows`, `RowTargets` and `made_together`.
    """
    if isinstance(tensor, Scattered):
        if len(tensor.pieces) > 1:
            raise NotImplementedError("a tensor whose values lie in several places in memory")
        return tensor.pieces[0].values if tensor.pieces else tensor.gathered()
    if isinstance(tensor, Section):
        local = local_values(tensor.tensor)
        if not local.is_contiguous():
            raise NotImplementedError("sections of a tensor that is not contiguous in memory")
        ranges, _ = _held(tensor.tensor, 0)
        begin = _count_before(ranges, tensor.first)
        return local.view(-1)[begin : _count_before(ranges, tensor.first + tensor.numel())]
    if isinstance(tensor, Made):  # on no device, so that nobody takes the values of `like` for its own
        return local_values(tensor.like).to("meta", tensor.dtype)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(
    tensor: torch.Tensor | Made | Scattered, rank: int
) -> tuple[tuple[Range, ...], tuple[int, int] | None]:
    """The ranges of a tensor that this rank holds, and which copy of how many this is.

    None instead of the copy: others own the values.
    """
    if isinstance(tensor, Made):
        return _held(tensor.like, rank)
    if isinstance(tensor, Scattered):
        return tensor.ranges, tensor.copy
    if not isinstance(tensor, DTensor):
        return (((0, tensor.numel()),) if tensor.numel() else ()), (None if rank else (0, 1))
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return (), None
    ranges = tuple(ranges_of(tuple(tensor.shape), placements, tuple(mesh.shape), coordinate))
    if not _is_first(mesh):
        return ranges, None
    copy, copies = 0, 1
    for at, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            copy, copies = copy * size + at, copies * size
    return ranges, (copy, copies)


def _is_first(mesh: DeviceMesh) -> bool:
    """Whether a mesh is the first of all equal slices of the mesh that it was cut from.

    The other slices hold copies of its tensors.
    """
    root = mesh._get_root_mesh()  # pyright: ignore[reportPrivateUsage] # torch has no public way
    return root is mesh or bool((mesh.mesh == root.mesh.flatten()[0]).any())


def ranges_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], at: Sequence[int]
) -> list[Range]:
    """The ranges of a whole tensor that the rank at coordinate `at` of a mesh holds, in ascending order.

    Raises:
        NotImplementedError: a placement is neither sharded nor replicated.
    """
    return _flatten(shape, _kept(shape, placements, mesh_shape, at))


def count_ranges(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[int, int]:
    """The number of ranges, and of values, of the first rank of a mesh (the one that holds most).

    Raises:
        NotImplementedError: a placement is neither sharded nor replicated.
    """
    kept = _kept(shape, placements, mesh_shape, [0] * len(mesh_shape))
    lengths = [sum(count for _, count in runs) for runs in kept]
    last = _last_cut(shape, kept)
    ranges = 1 if last is None else math.prod(lengths[:last]) * len(kept[last])
    return ranges, math.prod(lengths)


def _kept(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], at: Sequence[int]
) -> list[list[Range]]:
    """The runs of each dimension that a rank holds."""
    kept = [[(0, length)] for length in shape]
    for placement, ranks, number in zip(placements, mesh_shape, at, strict=True):
        if isinstance(placement, _StridedShard):  # FSDP2 over tensor parallelism on the same dimension
            dim, pieces = int(placement.dim), int(placement.split_factor)
        elif isinstance(placement, Shard):
            dim, pieces = placement.dim, 1
        elif isinstance(placement, Replicate):
            continue
        else:
            raise NotImplementedError(
                f"tensors placed as {tuple(placements)}; only Shard and Replicate are supported"
            )
        kept[dim] = _cut(kept[dim], pieces, ranks, number)
    return kept


def _cut(runs: list[Range], pieces: int, ranks: int, number: int) -> list[Range]:
    """The part of a dimension for rank `number`: its chunk, of `ranks`, of each of `pieces` equal pieces."""
    length = sum(count for _, count in runs)
    found: list[Range] = []
    for piece in range(pieces):
        begin, end = _chunk(0, length, pieces, piece)
        begin, end = _chunk(begin, end, ranks, number)
        for first, count in runs:
            if begin < count and end > 0 and end > begin:
                start, stop = first + max(begin, 0), first + min(end, count)
                if found and sum(found[-1]) == start:
                    start = found.pop()[0]
                found.append((start, stop - start))
            begin, end = begin - count, end - count
    return found


def _chunk(begin: int, end: int, chunks: int, number: int) -> Range:
    """Begin and end of chunk `number` when `begin` to `end` is cut as by `torch.chunk`."""
    length = -(-(end - begin) // chunks)
    return min(begin + length * number, end), min(begin + length * (number + 1), end)


def _flatten(shape: Sequence[int], kept: list[list[Range]]) -> list[Range]:
    """The ranges of the whole tensor that the given runs of each dimension select together."""
    if not all(kept) or not math.prod(shape):
        return []
    last = _last_cut(shape, kept)
    if last is None:
        return [(0, math.prod(shape))]
    bases = [0]
    for dim in range(last):
        stride = math.prod(shape[dim + 1 :])
        numbers = list(itertools.chain.from_iterable(range(a, a + n) for a, n in kept[dim]))
        bases = [base + stride * number for base in bases for number in numbers]
    inner = math.prod(shape[last + 1 :])
    return [(base + first * inner, count * inner) for base in bases for first, count in kept[last]]


def _last_cut(shape: Sequence[int], kept: list[list[Range]]) -> int | None:
    """The last dimension that the rank does not hold in full."""
    return next((dim for dim in reversed(range(len(shape))) if kept[dim] != [(0, shape[dim])]), None)


def _within(ranges: Iterable[Range], first: int, end: int) -> tuple[Range, ...]:
    """The parts of ranges between two items of the whole, counted from the first of these."""
    cut = ((max(begin, first), min(begin + count, end)) for begin, count in ranges)
    return tuple((begin - first, stop - begin) for begin, stop in cut if stop > begin)


def _count_before(ranges: Sequence[Range], item: int) -> int:
    """Number of values in the ranges that come before value `item` of the whole."""
    return sum(min(max(item - first, 0), count) for first, count in ranges)
