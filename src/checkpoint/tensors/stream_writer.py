"""Writes tensors that are read piece by piece while they are written.

A file is written in blocks, several at a time. One thread does all that is to do for a block: it reads the
values, checksums the block, and writes it past the page cache where the file system allows that.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import bisect
import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.direct_io import DirectFile, direct_file
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES, FileLayout, plan
from cairn.checkpoint.tensors.reader import as_bytes, as_memory
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.checkpoint.tensors.source import TensorSource
from cairn.run.files import forget_cached, naming, write_atomic

PIECE_BYTES = 16 << 20
"""Bytes of a piece of a tensor."""
BLOCK_BYTES = 8 << 20
"""Bytes of a file that are written at once: a part of what has one checksum."""
THREADS = 4
"""Threads that read and write."""
AHEAD = 2
"""Pieces that are read while one is used."""
Job = TypeVar("Job")
Result = TypeVar("Result")


def write_sources(
    folder: Path,
    sources: Mapping[str, TensorSource],
    stem: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> dict[str, FileChecksum]:
    """Write tensors to `<stem>.safetensors`, or several such files and an index; all of them are fsynced.

    Args:
        on_bytes: called with the number of bytes written since the last call.

    Returns:
        The checksums of the files, by name.

    Raises:
        Damaged: a source is invalid.
        OSError: a file can't be written; the error names it.
    """
    specs = [replace(source.spec, name=name) for name, source in sources.items()]
    files, index = plan(specs, stem, max_file_bytes=max_file_bytes)
    written: dict[str, FileChecksum] = {}
    largest = max(file.size for file in files)
    memory = Memory(min(BLOCK_BYTES, -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE))
    with ThreadPoolExecutor(THREADS) as pool:
        for file in files:
            path = folder / file.name
            with naming(path), direct_file(path, file.size) as out:
                out.allocate(0, file.size)
                written[file.name] = _write_file(out, _Content(file, sources), memory, pool, on_bytes)
                out.sync()
                forget_cached(out.fd)  # what is not aligned to pages went through it
    if index is not None:
        name = f"{stem}.safetensors.index.json"
        write_atomic(folder / name, index, durable=True)
        written[name] = FileChecksum.of(index)
    return written


class Memory:
    """A block of memory for each thread, aligned to pages as O_DIRECT needs it, which is used again.

    Fresh memory is slow: its pages are made when they are touched.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._of_thread = threading.local()

    def mine(self) -> torch.Tensor:
        """This thread's block, uint8 [nbytes]."""
        found: torch.Tensor | None = getattr(self._of_thread, "block", None)
        if found is None:
            found = torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8)
            self._of_thread.block = found
        return found


class _Content:
    """The bytes of a file."""

    def __init__(self, file: FileLayout, sources: Mapping[str, TensorSource]):
        self.file = file
        self._tensors = [
            (offset, offset + sources[name].spec.nbytes, sources[name])
            for name, offset in file.offsets.items()
        ]

    def read(self, start: int, memory: torch.Tensor) -> None:
        """Fill `memory` with the bytes from `start` on.

        Raises:
            Damaged: a source is invalid.
        """
        header = self.file.header[start : start + len(memory)]
        if header:
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        number = bisect.bisect_right(self._tensors, start, key=lambda tensor: tensor[1])
        for offset, end, source in self._tensors[number:]:
            if offset >= start + len(memory):
                break
            low, high = max(start, offset), min(start + len(memory), end)
            if low < high:
                _read_part(source, low - offset, high - offset, memory[low - start : high - start])


def _read_part(source: TensorSource, low: int, high: int, part: torch.Tensor) -> None:
    """Read the bytes from `low` to `high` of a tensor."""
    dtype = dtype_of(source)
    size = dtype.itemsize
    if low % size == high % size == part.storage_offset() % size == 0:
        source.fill(low // size, part.view(dtype))
    else:  # a value lies in two blocks, or behind an odd number of bytes
        first, last = low // size, -(-high // size)
        values = torch.empty(last - first, dtype=dtype)
        source.fill(first, values)
        part.copy_(as_bytes(values)[low - first * size :][: len(part)])


def _write_file(
    out: DirectFile,
    content: _Content,
    memory: Memory,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
) -> FileChecksum:
    """Write all of a file; returns its checksums.

    Raises:
        Damaged: a source is invalid.
        OSError: the file can't be written.
    """
    size = content.file.size

    def write(start: int) -> tuple[int, FileChecksum]:
        block = memory.mine()[: size - start]
        content.read(start, block)
        data = as_memory(block)
        checksum = FileChecksum(size)
        checksum.add(start, data)
        aligned = len(data) // mmap.PAGESIZE * mmap.PAGESIZE
        out.write(data[:aligned], start)
        out.write(data[aligned:], start + aligned)
        return len(data), checksum

    checksum = FileChecksum(size)
    with contextlib.closing(in_order(pool, write, range(0, size, memory.nbytes))) as blocks:
        for count, part in blocks:  # none is under way when the file is closed, also after an error
            checksum.merge(part)
            on_bytes(count)
    return checksum


def in_order(
    pool: ThreadPoolExecutor, do: Callable[[Job], Result], jobs: Iterable[Job], ahead: int = 2 * THREADS
) -> Generator[Result]:
    """The results of jobs, in order; `ahead` more are given to the pool while one is used.

    When it ends, or is closed, no job is under way.
    """
    under_way: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            under_way.append(pool.submit(do, job))
            if len(under_way) > ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
        wait(under_way)


def value_of(source: TensorSource) -> float | int:
    """The value of a tensor of one value.

    Raises:
        Damaged: it has more, or is invalid.
    """
    if source.spec.shape not in ((), (1,)):
        raise Damaged(f"{source.spec.name} has shape {list(source.spec.shape)} instead of one value")
    value = torch.empty(1, dtype=dtype_of(source))
    source.fill(0, value)
    return value.item()


def pieces_of(source: TensorSource) -> Iterator[torch.Tensor]:
    """The values of a tensor, flat, in pieces that follow each other; some are read while one is used.

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

    with ThreadPoolExecutor(AHEAD) as pool:
        yield from in_order(pool, read, range(0, count, each), AHEAD)
