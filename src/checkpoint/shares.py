"""Which values of a tensor a rank holds, whatever the mesh and the placements: ranges of the whole.

The whole is the tensor's values in row-major order, as they lie in a file. A rank of FSDP2, which shards on
dimension 0, holds one range of it; so does every rank of a tensor that is replicated. A shard on another
dimension is one range for each row, and a mesh of several dimensions cuts those once more. Of ranks that hold
the same ranges one owns them: it writes them, and counts them in the checksums of what it reads.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    Placement,
    _StridedShard,  # pyright: ignore[reportPrivateUsage] # FSDP2 makes it, and it has no public name
)

from cairn.checkpoint.formats.hub import Place

Range = tuple[int, int]
"""The first of some values that follow each other, and how many they are."""


class Section:
    """`shape` values of a tensor from item `first` on, contiguous in it; stands for a tensor of its own.

    Such are the experts of a layer that is one tensor in memory and many in files (`checkpoint.formats.hub`).
    """

    def __init__(self, tensor: torch.Tensor, first: int, shape: tuple[int, ...]):
        self.tensor = tensor
        self.first = first
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensor."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self.tensor.device

    def numel(self) -> int:
        """Number of values on all ranks together."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of one value."""
        return self.tensor.element_size()


Stored = torch.Tensor | Section
"""What is one tensor in a file."""


def at_places(tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place]) -> dict[str, Stored]:
    """A file's tensors by their names in it; one that is only a part of a tensor in memory is a section."""
    return {
        name: tensors[place.name]
        if place.shape == tuple(tensors[place.name].shape)
        else Section(tensors[place.name], place.first, place.shape)
        for name, place in places.items()
    }


@dataclass(frozen=True)
class Share:
    """What this rank holds of one tensor.

    dtype, shape: of the whole. ranges: the values of the whole that the rank holds, in ascending order.
    local: those values, in the order of the ranges once flattened; it shares the tensor's memory and may be
    strided. owned: whether this rank, of all that hold these ranges, writes and counts them.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    local: torch.Tensor
    owned: bool

    def byte_ranges(self) -> list[Range]:
        """The ranges in bytes of the whole."""
        size = self.dtype.itemsize
        return [(first * size, count * size) for first, count in self.ranges]

    def cut(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each range's first value in the whole, and its values in `flat`, which is as long as `local`."""
        position = 0
        for first, count in self.ranges:
            yield first, flat[position : position + count]
            position += count


def share_of(name: str, tensor: Stored, rank: int) -> Share:
    """This rank's share of `tensor`. Rank 0 owns what is no DTensor, which every rank has.

    Raises:
        NotImplementedError: its placement is not one of sharding and replicating.
    """
    with torch.no_grad():
        local = local_values(tensor).detach()
    if not isinstance(tensor, Section):
        ranges, owned = _held(tensor, rank)
        return Share(name, tensor.dtype, tuple(tensor.shape), ranges, local, owned)
    whole, owned = _held(tensor.tensor, rank)
    end = tensor.first + tensor.numel()
    cut = [(max(first, tensor.first), min(first + count, end)) for first, count in whole]
    ranges = tuple((first - tensor.first, stop - first) for first, stop in cut if stop > first)
    return Share(name, tensor.dtype, tuple(tensor.shape), ranges, local, owned)


def local_values(tensor: Stored) -> torch.Tensor:
    """This rank's values of a tensor, sharing its memory; call it under `torch.no_grad`."""
    if isinstance(tensor, Section):
        local = local_values(tensor.tensor)
        if not local.is_contiguous():
            raise NotImplementedError("sections of a tensor that is not contiguous in memory")
        ranges, _ = _held(tensor.tensor, 0)
        begin = _count_before(ranges, tensor.first)
        return local.view(-1)[begin : _count_before(ranges, tensor.first + tensor.numel())]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(tensor: torch.Tensor, rank: int) -> tuple[tuple[Range, ...], bool]:
    """The ranges of a tensor that this rank holds, and whether it owns them."""
    if not isinstance(tensor, DTensor):
        return (((0, tensor.numel()),) if tensor.numel() else ()), rank == 0
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the mesh
        return (), False
    ranges = tuple(ranges_of(tuple(tensor.shape), placements, tuple(mesh.shape), coordinate))
    copies = [at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()]
    return ranges, not any(copies) and _is_first(mesh)


def _is_first(mesh: DeviceMesh) -> bool:
    """Whether a mesh is, of all equal slices of the mesh that it was cut from, the first one.

    The others hold copies of its tensors.
    """
    root = mesh._get_root_mesh()  # pyright: ignore[reportPrivateUsage] # torch has no public way
    return root is mesh or bool((mesh.mesh == root.mesh.flatten()[0]).any())


def ranges_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], at: Sequence[int]
) -> list[Range]:
    """The ranges of a whole tensor that the rank at coordinate `at` of a mesh holds, in ascending order.

    Raises:
        NotImplementedError: a placement is not one of sharding and replicating.
    """
    return _flatten(shape, _kept(shape, placements, mesh_shape, at))


def count_ranges(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[int, int]:
    """How many ranges the first rank of a mesh, which holds most, has, and of how many values in all.

    Raises:
        NotImplementedError: a placement is not one of sharding and replicating.
    """
    kept = _kept(shape, placements, mesh_shape, [0] * len(mesh_shape))
    lengths = [sum(count for _, count in runs) for runs in kept]
    last = _last_cut(shape, kept)
    ranges = 1 if last is None else math.prod(lengths[:last]) * len(kept[last])
    return ranges, math.prod(lengths)


def _kept(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], at: Sequence[int]
) -> list[list[Range]]:
    """What a rank holds of each dimension."""
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
                f"tensors placed as {tuple(placements)}: only shards and replicas are known"
            )
        kept[dim] = _cut(kept[dim], pieces, ranks, number)
    return kept


def _cut(runs: list[Range], pieces: int, ranks: int, number: int) -> list[Range]:
    """What rank `number` gets of a dimension: of each of `pieces` equal pieces, its chunk of `ranks`."""
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
    """Where chunk `number` of `begin` to `end` begins and ends, cut as by `torch.chunk`."""
    length = -(-(end - begin) // chunks)
    return min(begin + length * number, end), min(begin + length * (number + 1), end)


def _flatten(shape: Sequence[int], kept: list[list[Range]]) -> list[Range]:
    """The ranges of the whole that the given runs of each dimension make up together."""
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
    """The last dimension of which the rank does not hold all."""
    return next((dim for dim in reversed(range(len(shape))) if kept[dim] != [(0, shape[dim])]), None)


def _count_before(ranges: Sequence[Range], item: int) -> int:
    """How many values of the ranges come before value `item` of the whole."""
    return sum(min(max(item - first, 0), count) for first, count in ranges)
