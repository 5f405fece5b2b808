"""Tensors to and from safetensors files, all ranks in parallel, no gather.

An FSDP2 shard on dimension 0 is one contiguous range of the whole tensor's bytes. So each rank writes its
ranges straight into the final files, and reads only its ranges back, on any number of ranks.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cairn.checkpoint.layout import MAX_FILE_BYTES, StoredTensor, TensorSpec, find_tensors, plan
from cairn.checkpoint.manifest import CheckpointError, Damaged

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def write_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    stem: str,
    *,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write whole tensors and this rank's shards of DTensors to `<stem>.safetensors` or several such files.

    Every rank calls it with the same names in the same order; `barrier` waits for all of them. The files do
    not depend on the number of ranks. Nothing is fsynced.
    """
    specs = [TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    files, index = plan(specs, stem, max_file_bytes=max_file_bytes)
    if rank == 0:
        for file in files:
            with open(folder / file.name, "wb") as out:
                out.write(file.header)
                out.truncate(file.size)
        if index is not None:
            (folder / f"{stem}.safetensors.index.json").write_bytes(index)
    barrier()
    for file in files:
        fd = os.open(folder / file.name, os.O_WRONLY)
        try:
            for name, start in file.offsets.items():
                local, item = _local_range(tensors[name], rank)
                if local is not None and local.numel():
                    _write_all(fd, local, start + item * local.element_size())
        finally:
            os.close(fd)
    barrier()


def read_tensors(folder: Path, targets: Mapping[str, torch.Tensor], stem: str) -> None:
    """Fill `targets` in place, converting the data type: whole tensors, or this rank's shards of DTensors.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        Damaged: a file is damaged.
    """
    stored = find_tensors(folder, stem)
    missing = sorted(targets.keys() - stored.keys())
    if missing:
        raise CheckpointError(f"{folder} holds no tensor {missing[0]!r} ({len(missing)} missing in all)")
    for name, target in targets.items():
        if stored[name].spec.shape != tuple(target.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {list(stored[name].spec.shape)}, expected {list(target.shape)}"
            )
    fds: dict[Path, int] = {}
    try:
        for name, target in targets.items():
            path = stored[name].path
            if path not in fds:
                fds[path] = os.open(path, os.O_RDONLY)
            _read_local(fds[path], stored[name], target)
    finally:
        for fd in fds.values():
            os.close(fd)


def _local_range(tensor: torch.Tensor, rank: int) -> tuple[torch.Tensor | None, int]:
    """The part of `tensor` that this rank writes, and the index of its first item in the whole tensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return (tensor if rank == 0 else None), 0
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return (tensor.to_local() if rank == 0 else None), 0
    return tensor.to_local(), _first_item(tensor)


def _first_item(tensor: DTensor) -> int:
    if tuple(tensor.placements) != (Shard(0),):
        raise NotImplementedError(
            f"tensors placed as {tensor.placements}; only shards on dimension 0 are known"
        )
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * tensor.shape[1:].numel()


def _write_all(fd: int, tensor: torch.Tensor, offset: int) -> None:
    view = memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def _read_local(fd: int, stored: StoredTensor, target: torch.Tensor) -> None:
    target = target.detach()
    first = 0
    if isinstance(target, DTensor):
        if not all(isinstance(placement, Replicate) for placement in target.placements):
            first = _first_item(target)
        target = target.to_local()
    if not target.numel():
        return
    buffer = torch.empty(target.shape, dtype=DTYPES[stored.spec.dtype])
    view = memoryview(buffer.view(-1).view(torch.uint8).numpy())
    offset = stored.offset + first * buffer.element_size()
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise Damaged(f"{stored.path}: ends in the middle of {stored.spec.name}")
        view = view[count:]
        offset += count
    target.copy_(buffer)
