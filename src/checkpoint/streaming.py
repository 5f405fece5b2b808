"""Writes tensors that are read piece by piece while they are written, and compares them in the same way."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import torch

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.dtypes import DTYPE_NAMES
from cairn.checkpoint.formats.content import Source
from cairn.checkpoint.layout import MAX_FILE_BYTES, TensorSpec, plan
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.reader import as_bytes, as_memory
from cairn.checkpoint.tensors import dtype_of
from cairn.run.files import naming, write_atomic

PIECE_BYTES = 16 << 20
"""Bytes of a tensor in memory at a time; a second piece is read while the first is written."""
Dtypes = Mapping[str, torch.dtype]
AS_THEY_ARE: Dtypes = MappingProxyType({})


def write_sources(
    folder: Path,
    sources: Mapping[str, Source],
    stem: str,
    *,
    dtypes: Dtypes = AS_THEY_ARE,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> dict[str, FileChecksum]:
    """Write tensors to `<stem>.safetensors`, or several such files and an index; all of them are fsynced.

    Args:
        dtypes: the data types of those tensors that are not written as they are, by name.
        on_bytes: called with the number of bytes written since the last call.

    Returns:
        The checksums of the files, by name.

    Raises:
        Damaged: a source is invalid.
        OSError: a file can't be written; the error names it.
    """
    types = {name: dtypes.get(name, dtype_of(source)) for name, source in sources.items()}
    specs = [TensorSpec(name, DTYPE_NAMES[types[name]], sources[name].spec.shape) for name in sources]
    files, index = plan(specs, stem, max_file_bytes=max_file_bytes)
    written: dict[str, FileChecksum] = {}
    for file in files:
        path = folder / file.name
        checksum = written[file.name] = FileChecksum(file.size)
        with naming(path), open(path, "wb") as out:
            out.write(file.header)
            checksum.add(0, file.header)
            for name in file.offsets:
                for piece in pieces_of(sources[name]):
                    data = as_memory(piece.to(types[name]))
                    checksum.add(out.tell(), data)
                    out.write(data)
                    on_bytes(len(data))
            out.flush()
            os.fsync(out.fileno())
    if index is not None:
        name = f"{stem}.safetensors.index.json"
        write_atomic(folder / name, index, durable=True)
        written[name] = FileChecksum(len(index))
        written[name].add(0, index)
    return written


def pieces_of(source: Source) -> Iterator[torch.Tensor]:
    """The values of a tensor, flat, in pieces that follow each other; the next is read while one is used.

    Raises:
        Damaged: the source is invalid.
    """
    dtype = dtype_of(source)
    count = torch.Size(source.spec.shape).numel()
    each = PIECE_BYTES // dtype.itemsize

    def read(first: int) -> torch.Tensor:
        values = torch.empty(min(each, count - first), dtype=dtype)
        source.fill(first, values)
        return values

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(read, 0)
        for first in range(0, count, each):
            values = following.result()
            if first + each < count:
                following = pool.submit(read, first + each)
            yield values


def check_equal(
    written: Mapping[str, Source],
    expected: Mapping[str, Source],
    where: Path,
    *,
    dtypes: Dtypes = AS_THEY_ARE,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Compare tensors, bit for bit, with those that they were made from.

    Args:
        where: names what was written in errors.
        dtypes: the data types into which tensors were converted, by name.

    Raises:
        Damaged: a tensor is missing, or differs.
    """
    if missing := sorted(expected.keys() - written.keys()):
        raise Damaged(f"{where}: reading back found no {', '.join(missing)}")
    for name, source in expected.items():
        dtype = dtypes.get(name, dtype_of(source))
        ours = written[name]
        if (ours.spec.shape, dtype_of(ours)) != (source.spec.shape, dtype):
            raise Damaged(f"{where}: {name} has another shape or data type than was written")
        for got, wanted in zip(in_steps(ours), in_steps(source), strict=True):
            if not torch.equal(as_bytes(got), as_bytes(wanted.to(dtype))):
                raise Damaged(f"{where}: {name} differs from what was written")
            on_bytes(got.nbytes)


def in_steps(source: Source) -> Iterator[torch.Tensor]:
    """The values of a tensor in pieces of a fixed number of values, whatever its data type."""
    for piece in pieces_of(source):
        yield from piece.split(PIECE_BYTES // 8)
