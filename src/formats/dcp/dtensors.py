"""Reads tensors that each rank of a program saved its own shard of: DTensors in files of `torch.save`.

The classes that such a file names are not made: each stands for a record of its fields, from which follows
what part of the whole tensor a rank holds.
"""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.reader import DTYPE_NAMES
from cairn.formats.dcp.dcp_tensors import Chunk, DcpSource, DcpTensor, check_covered
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle, PickledObject, ignored, record
from cairn.formats.torch_file.torch_stream import MAX_VALUES, SavedTensor, Size, Stream

MAX_RANKS = 1 << 20


class _Made(PickledObject):
    """A record that may be made from arguments."""

    def __init__(self, *arguments: object):
        super().__init__()
        self.values = arguments


class Placement(_Made):
    """How a tensor lies on the ranks of one dimension of the mesh."""

    @property
    def kind(self) -> str:
        """The name of the class, such as Shard."""
        return type(self).__name__

    @property
    def dim(self) -> object:
        return self.fields.get("dim", self.values[0] if self.values else None)


@dataclass(frozen=True)
class Sharded:
    """A rank's part of a tensor: what the file says of it, and where its values are."""

    local: SavedTensor
    spec: PickledObject


_SPEC, _MESH = record("DTensorSpec"), record("DeviceMesh")
_LAYOUT, _AXIS = record("_MeshLayout"), record("_FlatLayout")
_META = type("TensorMeta", (_Made,), {})
_PLACEMENTS = {
    name: type(name, (Placement,), {})
    for name in ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
}


def _wrapper(rebuild: object, kind: object, arguments: object, state: object) -> Sharded:
    """Stands for the function that makes a DTensor."""
    if isinstance(state, tuple) and len(state) == 2:  # __dict__, and what is in __slots__
        state = state[1]
    if rebuild is not ignored or kind is not _DTENSOR or not isinstance(state, dict):
        raise ForbiddenPickle("a tensor of another class than DTensor is made")
    local, spec = state.get("_local_tensor"), state.get("_spec")
    if not isinstance(local, SavedTensor) or not isinstance(spec, _SPEC):
        raise Damaged("a DTensor has no values")
    return Sharded(local, spec)


_DTENSOR = record("DTensor")
_PACKAGES = ("torch.distributed.tensor", "torch.distributed._tensor")
_MESHES = "torch.distributed._mesh_layout"
ALLOWED: Mapping[tuple[str, str], Any] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _wrapper,
    ("torch._utils", "_rebuild_wrapper_subclass"): ignored,
    **{(f"{package}{part}", "DTensor"): _DTENSOR for package in _PACKAGES for part in ("", "._api", ".api")},
    **{
        (f"{package}.{part}", name): kind
        for package in _PACKAGES
        for part in ("_dtensor_spec", "placement_types")
        for name, kind in (("DTensorSpec", _SPEC), ("TensorMeta", _META), ("ShardOrderEntry", ignored))
    },
    **{
        (f"{package}.placement_types", name): kind
        for package in _PACKAGES
        for name, kind in _PLACEMENTS.items()
    },
    ("torch.distributed.device_mesh", "DeviceMesh"): _MESH,
    (_MESHES, "_MeshLayout"): _LAYOUT,
    (_MESHES, "_FlatLayout"): _AXIS,
    ("torch", "device"): ignored,
    ("torch.serialization", "_get_layout"): ignored,
}
"""What such a file may name beside plain tensors, and what stands for it, in several versions of torch."""


def is_tensor(value: object) -> bool:
    """Whether a value in a file that was read with ALLOWED is a tensor."""
    return isinstance(value, (SavedTensor, Sharded))


def joined(name: str, parts: Sequence[object]) -> DcpSource:
    """The whole tensor of which `parts` has each rank's part, in the order of the ranks.

    A tensor that is no DTensor is the same on every rank, and the first rank's is read.

    Raises:
        CheckpointError: it is sharded in a way that Cairn does not read.
        Damaged: the parts do not make a whole tensor.
    """
    if all(isinstance(part, SavedTensor) for part in parts):
        whole = [part for part in parts if isinstance(part, SavedTensor)]
        if len({(part.shape, part.dtype) for part in whole}) != 1:
            raise Damaged(f"{name} has different shapes on different ranks, but is not sharded")
        first = whole[0]
        return _source(name, first.dtype, first.shape, [((0,) * len(first.shape), first)])
    shards = [part for part in parts if isinstance(part, Sharded)]
    if len(shards) != len(parts):
        raise Damaged(f"{name} is sharded on some ranks, and not on others")
    shape, dtype = _global(name, shards[0].spec)
    held: list[tuple[tuple[int, ...], SavedTensor]] = []
    for rank, shard in enumerate(shards):
        if _global(name, shard.spec) != (shape, dtype) or shard.local.dtype != dtype:
            raise Damaged(f"{name} has another shape or data type on rank {rank} than on rank 0")
        place = _place(name, shard.spec, shape, rank, len(shards))
        if place is None:
            continue  # a copy of what another rank holds
        begin, local = place
        if local != shard.local.shape:
            raise Damaged(
                f"{name}: rank {rank} holds {list(shard.local.shape)}, and {list(local)} belongs to it"
            )
        held.append((begin, shard.local))
    return _source(name, dtype, shape, held)


def _source(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    held: Iterable[tuple[tuple[int, ...], SavedTensor]],
) -> DcpSource:
    """The tensor whose parts begin at these positions."""
    if dtype not in DTYPE_NAMES:
        raise Damaged(f"{name} is of {dtype}, which can't be stored")
    located: dict[Chunk, SavedTensor] = {}
    for begin, part in held:
        if part.size:
            located[Chunk(begin, part.shape, Stream(part.path, 0, 0))] = SavedTensor.of(name, part)
    check_covered(name, shape, located)
    return DcpSource.of(name, DcpTensor(dtype, shape, tuple(located)), located)


def _global(name: str, spec: PickledObject) -> tuple[tuple[int, ...], torch.dtype]:
    """The whole tensor's shape and data type."""
    meta = spec.fields.get("tensor_meta")
    if not isinstance(meta, _META) or len(meta.values) != 3:
        raise Damaged(f"{name} does not say its shape")
    shape, _, dtype = meta.values
    if not isinstance(shape, Size) or not isinstance(dtype, torch.dtype):
        raise Damaged(f"{name} does not say its shape")
    if math.prod(shape) > MAX_VALUES:
        raise ForbiddenPickle(f"{name} has the absurd shape {list(shape)}")
    return tuple(shape), dtype


def _place(
    name: str, spec: PickledObject, shape: tuple[int, ...], rank: int, world_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where a rank's part begins, and its shape; None if a rank before it holds the same.

    As in torch, `Shard` cuts into parts of equal length, of which the last ones may be shorter or empty.
    """
    sizes = _mesh_sizes(name, spec.fields.get("mesh"), world_size)
    placements = spec.fields.get("placements")
    if not isinstance(placements, (tuple, list)) or len(placements) != len(sizes):
        raise Damaged(f"{name} has no placement for each dimension of its mesh")
    begin, length = [0] * len(shape), list(shape)
    left, below = world_size, rank
    for size, placement in zip(sizes, placements, strict=True):
        left //= size
        coordinate, below = divmod(below, left)
        kind = placement.kind if isinstance(placement, Placement) else type(placement).__name__
        if kind == "Replicate":
            if coordinate:
                return None
            continue
        if not isinstance(placement, Placement) or kind != "Shard":
            raise CheckpointError(f"{name} is placed as {kind}; Cairn reads Shard and Replicate")
        dim = placement.dim
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise Damaged(f"{name} is sharded by dimension {dim!r}, and its shape is {list(shape)}")
        each = -(-length[dim] // size)
        low = min(coordinate * each, length[dim])
        begin[dim], length[dim] = begin[dim] + low, min(each, length[dim] - low)
    return tuple(begin), tuple(length)


def _mesh_sizes(name: str, mesh: object, world_size: int) -> tuple[int, ...]:
    """The lengths of the mesh's dimensions; it holds the ranks in their order."""
    if not isinstance(mesh, _MESH):
        raise Damaged(f"{name} has no mesh of ranks")
    if mesh in _SIZES:
        return _SIZES[mesh]
    whole, layout = mesh.fields.get("mesh"), mesh.fields.get("_layout")
    if isinstance(whole, SavedTensor):  # before torch 2.9
        sizes, steps, ranks = whole.shape, _steps(whole.shape), whole
    elif isinstance(layout, _LAYOUT):
        sizes, steps = _axes(name, layout)
        ranks = mesh.fields.get("_rank_map")
    else:
        raise Damaged(f"{name} has a mesh without ranks")
    in_order = steps == _steps(sizes) and math.prod(sizes) == world_size
    if not isinstance(ranks, SavedTensor) or math.prod(ranks.shape) != world_size or not in_order:
        raise CheckpointError(
            f"{name} lies on a mesh of {list(sizes)} ranks, not on one of all {world_size} ranks in order"
        )
    if _numbers(ranks) != list(range(world_size)):
        raise CheckpointError(f"{name} lies on a mesh whose ranks are not in order")
    _SIZES[mesh] = sizes
    return sizes


_SIZES: weakref.WeakKeyDictionary[PickledObject, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""Lengths of the meshes that were checked; all tensors of a rank's file share one."""


def _axes(name: str, layout: PickledObject) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of a layout's dimensions, and the distances of ranks in them."""
    axes = layout.fields.get("axes")
    sizes: list[int] = []
    steps: list[int] = []
    for axis in axes if isinstance(axes, tuple) else (layout,):
        about: Mapping[str, Any] = axis.fields if isinstance(axis, (_AXIS, _LAYOUT)) else {}
        lengths, apart = (
            [found] if type(found) is int else found for found in (about.get("shape"), about.get("stride"))
        )
        if not isinstance(lengths, (list, tuple)) or not isinstance(apart, (list, tuple)):
            raise Damaged(f"{name} has a mesh without sizes")
        if len(lengths) != len(apart) or any(type(n) is not int or n < 0 for n in (*lengths, *apart)):
            raise Damaged(f"{name} has a mesh of an unknown layout")
        if axis is layout:  # torch 2.9 and 2.10 have one for all dimensions
            sizes, steps = [*lengths], [*apart]
        else:
            sizes.append(math.prod(lengths))
            steps.append(min(apart, default=1))
    return tuple(sizes), tuple(1 if size == 1 else step for size, step in zip(sizes, steps, strict=True))


def _steps(sizes: Sequence[int]) -> tuple[int, ...]:
    """Distances of neighbours in each dimension, for ranks in order; 1 where there are no neighbours."""
    return tuple(1 if size == 1 else math.prod(sizes[dim + 1 :]) for dim, size in enumerate(sizes))


def _numbers(tensor: SavedTensor) -> list[int]:
    """The values of a small tensor of whole numbers."""
    if tensor.size > MAX_RANKS or tensor.dtype.is_floating_point:
        raise ForbiddenPickle("a mesh has an absurd number of ranks")
    numbers = torch.empty(tensor.size, dtype=tensor.dtype)
    tensor.fill(0, numbers)
    return numbers.tolist()
