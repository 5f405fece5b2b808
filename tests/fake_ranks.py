"""Single ranks of groups whose other ranks do not exist: what each would hold, without starting processes."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from cairn.checkpoint.tensors.placement import Section, Stored

ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
PLACED = {
    "two ranks": ((2,), (ROWS,)),
    "columns": ((3,), (COLUMNS,)),
    "copies of shards": ((2, 3), (COPIES, ROWS)),
    "shards of copies": ((3, 2), (COLUMNS, COPIES)),
    "blocks": ((2, 2), (ROWS, COLUMNS)),
    "rows twice": ((2, 2), (ROWS, ROWS)),
    "FSDP2 over tensor parallelism": ((2, 2), (_StridedShard(0, split_factor=2), ROWS)),
    "columns of copies of rows": ((2, 2, 2), (COPIES, ROWS, COLUMNS)),
}
"""Meshes, and what FSDP2, HSDP and tensor parallelism make of them."""


def rows_of(rank: int, world_size: int, count: int) -> tuple[int, int]:
    """The rows that torch.chunk, and so FSDP2, gives to a rank: first and behind the last."""
    each = -(-count // world_size)
    return min(rank * each, count), min((rank + 1) * each, count)


def local_of(
    whole: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int], at: Sequence[int]
) -> torch.Tensor:
    """What torch gives of a tensor to the rank at coordinate `at` of a mesh."""
    for placement, ranks, number in zip(placements, shape, at, strict=True):
        if not placement.is_replicate() and placement.dim < whole.ndim:
            pieces, _ = placement._split_tensor(whole, ranks, with_padding=False)
            whole = pieces[number]
    return whole


class FakeRank:
    """One rank of a group whose other ranks do not exist, as a context manager: its mesh, of any shape."""

    def __init__(self, rank: int, *shape: int):
        self.rank, self.shape = rank, shape

    def __enter__(self) -> DeviceMesh:
        _clear_sharding_prop_cache()  # the cache may hold tensors of the previous rank, whose mesh is equal
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=math.prod(self.shape))
        return init_device_mesh("cpu", self.shape, mesh_dim_names=tuple("abcd"[: len(self.shape)]))

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def as_rank(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Each tensor as a rank has it under FSDP2: shards on dimension 0, scalars whole."""
    own = {}
    for name, tensor in tensors.items():
        if not tensor.ndim:
            own[name] = tensor.clone()
            continue
        begin, end = rows_of(mesh.get_local_rank(), mesh.size(), tensor.shape[0])
        shape, stride = tensor.shape, tensor.contiguous().stride()
        own[name] = DTensor.from_local(
            tensor[begin:end].clone(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
    return own


def tensors_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], *, blank: bool = False
) -> dict[str, Stored]:
    """Tensors as one rank has them, and sections of one of them."""
    wholes = {
        "matrix": torch.arange(77.0).view(7, 11),
        "row": torch.arange(11.0).view(1, 11),
        "large": torch.arange(300 * 1001.0).view(300, 1001),
        "brief": torch.arange(48).view(12, 4).bfloat16(),
        "none": torch.zeros(0, 4),
        "experts": torch.arange(5 * 6 * 7.0).view(5, 6, 7),
    }
    own: dict[str, Stored] = {"plain": torch.arange(3.0)}
    for name, whole in wholes.items():
        local = local_of(
            whole, placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())
        ).contiguous()
        own[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    if blank:
        own = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    experts = own.pop("experts")
    return own | {
        f"experts.{i}.{h}": Section(experts, 42 * i + 21 * h, (3, 7)) for i in range(5) for h in (0, 1)
    }
