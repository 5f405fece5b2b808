"""Writes tensors that are read piece by piece while they are written, and compares them in the same way.

A file is written in blocks. While one is written, past the page cache where the file system allows it, the
next is converted and checksummed, and the values of the one after that are read. One thread reads, in the
order of the files: a source is never asked for two pieces at once.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import ctypes
import mmap
import queue
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum
from cairn.checkpoint.direct import WRITERS, DirectFile, direct_file
from cairn.checkpoint.dtypes import DTYPE_NAMES
from cairn.checkpoint.formats.content import Source
from cairn.checkpoint.layout import MAX_FILE_BYTES, FileLayout, TensorSpec, plan
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.reader import as_bytes, as_memory
from cairn.checkpoint.tensors import dtype_of
from cairn.run.files import naming, write_atomic

PIECE_BYTES = 16 << 20
"""Bytes of a piece of a tensor."""
BLOCK_BYTES = CHUNK_BYTES
"""Bytes of a file that are written at once; of so many, a file has a checksum."""
AHEAD = 2
"""Blocks or pieces that are read while one is used."""
SERIAL_VALUES = 1 << 15
"""Values that torch converts on the thread that asks for it: more would be divided among threads, which here
are busy with reading and writing."""
STEP_VALUES = 2 << 20
"""Values of a tensor that are compared at a time."""
Job = TypeVar("Job")
Result = TypeVar("Result")
Dtypes = Mapping[str, torch.dtype]
AS_THEY_ARE: Dtypes = MappingProxyType({})
_libc = ctypes.CDLL(None)


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
    blocks = _Blocks(max(file.size for file in files))
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(WRITERS) as writers:
        for file in files:
            path = folder / file.name
            with naming(path), direct_file(path, file.size) as out:
                out.allocate(0, file.size)
                content = _Content(file, {name: (sources[name], types[name]) for name in file.offsets})
                written[file.name] = _write_file(out, content, blocks, reader, writers, on_bytes)
                out.sync()
    if index is not None:
        name = f"{stem}.safetensors.index.json"
        write_atomic(folder / name, index, durable=True)
        written[name] = FileChecksum(len(index))
        written[name].add(0, index)
    return written


class _Room:
    """Memory for values that are read for a block and have to be converted."""

    def __init__(self, nbytes: int):
        self._nbytes = nbytes
        self._memory: torch.Tensor | None = None
        self._taken = 0

    def clear(self) -> None:
        """All of it is free again."""
        self._taken = 0

    def values(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for so many values, which stays taken until `clear`."""
        nbytes = count * dtype.itemsize
        if self._memory is None:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8)
        first, self._taken = self._taken, self._taken + -(-nbytes // 64) * 64
        if self._taken > self._nbytes:
            return torch.empty(count, dtype=dtype)
        return self._memory[first : first + nbytes].view(dtype)


class _Blocks:
    """The blocks of a file that are in memory at a time, aligned to pages as O_DIRECT needs it."""

    def __init__(self, largest: int):
        """Make blocks for files of up to `largest` bytes."""
        self.nbytes = min(BLOCK_BYTES, -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        """Those that are not in use."""
        self.rooms: queue.SimpleQueue[_Room] = queue.SimpleQueue()
        """For blocks that are read, until their values are converted; those that are not in use."""
        for _ in range(AHEAD + 1):
            self.rooms.put(_Room(2 * self.nbytes))
        for _ in range(AHEAD + 1 + WRITERS):
            self.free.put(torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8))


@dataclass(frozen=True)
class _Raw:
    """Values that were read for a part of a block and have to be converted: the bytes from `skip` on."""

    part: torch.Tensor
    values: torch.Tensor
    dtype: torch.dtype
    skip: int

    def convert(self) -> None:
        """Put the values into the block, in the data type of the file."""
        size = self.dtype.itemsize
        even = self.part.storage_offset() % size == 0
        if even and self.skip == 0 and len(self.part) == len(self.values) * size:
            into = self.part.view(self.dtype)
            for first in range(0, len(into), SERIAL_VALUES):
                into[first : first + SERIAL_VALUES].copy_(self.values[first : first + SERIAL_VALUES])
        else:  # a value lies in two blocks, or behind an odd number of bytes
            data = as_bytes(self.values.to(self.dtype))
            self.part.copy_(data[self.skip : self.skip + len(self.part)])


class _Content:
    """The bytes of a file, read block after block."""

    def __init__(self, file: FileLayout, tensors: Mapping[str, tuple[Source, torch.dtype]]):
        self.file = file
        self._tensors = tensors
        self._left = deque(file.offsets)
        """The tensors that no block holds to their end yet, in file order."""

    def read(self, start: int, block: torch.Tensor, room: _Room) -> list[_Raw]:
        """Fill a block with the bytes from `start` on; returns what is still to convert, which is in `room`.

        Raises:
            Damaged: a source is invalid.
        """
        memory = block[: self.file.size - start]
        header = self.file.header[start : start + len(memory)]
        if header:
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        raw: list[_Raw] = []
        while self._left:
            name = self._left[0]
            source, dtype = self._tensors[name]
            offset = self.file.offsets[name]
            end = offset + torch.Size(source.spec.shape).numel() * dtype.itemsize
            low, high = max(start, offset), min(start + len(memory), end)
            if low < high:
                part = memory[low - start : high - start]
                raw += _read_part(source, dtype, low - offset, high - offset, part, room)
            if end > start + len(memory):
                break
            self._left.popleft()
        return raw


def _read_part(
    source: Source, dtype: torch.dtype, low: int, high: int, part: torch.Tensor, room: _Room
) -> list[_Raw]:
    """Read the bytes from `low` to `high` that a tensor has as `dtype`, straight into `part` if possible."""
    size = dtype.itemsize
    first, last = low // size, -(-high // size)
    whole = low % size == high % size == part.storage_offset() % size == 0
    if whole and dtype == dtype_of(source):
        source.fill(first, part.view(dtype))
        return []
    values = room.values(last - first, dtype_of(source))
    source.fill(first, values)
    return [_Raw(part, values, dtype, low - first * size)]


def _write_file(
    out: DirectFile,
    content: _Content,
    blocks: _Blocks,
    reader: ThreadPoolExecutor,
    writers: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
) -> FileChecksum:
    """Write all of a file; returns its checksums.

    Raises:
        Damaged: a source is invalid.
        OSError: the file can't be written.
    """
    size = content.file.size
    checksum = FileChecksum(size)

    def read(start: int) -> tuple[int, torch.Tensor, _Room, list[_Raw]]:
        block, room = blocks.free.get(), blocks.rooms.get()
        try:
            return start, block, room, content.read(start, block, room)
        except BaseException:
            blocks.free.put(block)
            blocks.rooms.put(room)
            raise

    def write(block: torch.Tensor, data: memoryview, start: int) -> None:
        try:
            aligned = len(data) // mmap.PAGESIZE * mmap.PAGESIZE
            out.write(data[:aligned], start)
            out.write(data[aligned:], start + aligned)
        finally:
            blocks.free.put(block)

    writes: deque[Future[None]] = deque()
    try:
        for start, block, room, raw in _ahead(reader, read, range(0, size, blocks.nbytes)):
            for values in raw:
                values.convert()
            room.clear()
            blocks.rooms.put(room)
            data = as_memory(block[: size - start])
            checksum.add(start, data)
            writes.append(writers.submit(write, block, data, start))
            on_bytes(len(data))
            while len(writes) > WRITERS:
                writes.popleft().result()
        while writes:
            writes.popleft().result()
    finally:
        wait(writes)  # they must finish before the file is closed
    return checksum


def _ahead(pool: ThreadPoolExecutor, do: Callable[[Job], Result], jobs: Iterable[Job]) -> Generator[Result]:
    """The results of jobs, in order; AHEAD more are under way while one is used."""
    under_way: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            under_way.append(pool.submit(do, job))
            if len(under_way) > AHEAD:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        wait(under_way)


def pieces_of(source: Source) -> Iterator[torch.Tensor]:
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

    with ThreadPoolExecutor(1) as pool:
        yield from _ahead(pool, read, range(0, count, each))


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
        found, dtype = written[name].spec, dtypes.get(name, dtype_of(source))
        if (found.shape, dtype_of(written[name])) != (source.spec.shape, dtype):
            raise Damaged(f"{where}: {name} has another shape or data type than was written")
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
        ours = _ahead(pool, _Reader(written).read, _steps(expected))
        theirs = _ahead(other, _Reader(expected).read, _steps(expected))
        for (name, _, _), got, wanted in zip(_steps(expected), ours, theirs, strict=True):
            if not _same_bits(got, _converted(wanted, got.dtype)):
                raise Damaged(f"{where}: {name} differs from what was written")
            on_bytes(got.nbytes)


def _steps(sources: Mapping[str, Source]) -> Iterator[tuple[str, int, int]]:
    """Pieces of all tensors, in order: the name, the first value, and the number of values."""
    for name, source in sources.items():
        count = torch.Size(source.spec.shape).numel()
        for first in range(0, count, STEP_VALUES):
            yield name, first, min(STEP_VALUES, count - first)


class _Reader:
    """Reads pieces of tensors into memory that is used again: each is valid until AHEAD + 1 more are read."""

    def __init__(self, sources: Mapping[str, Source]):
        self._sources = sources
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._number = 0

    def read(self, step: tuple[str, int, int]) -> torch.Tensor:
        """The values of a piece.

        Raises:
            Damaged: the source is invalid.
        """
        name, first, count = step
        dtype = dtype_of(self._sources[name])
        key = (self._number % (AHEAD + 1), dtype)
        self._number += 1
        if key not in self._memory:
            self._memory[key] = torch.empty(STEP_VALUES, dtype=dtype)
        values = self._memory[key][:count]
        self._sources[name].fill(first, values)
        return values


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in another data type, converted on this thread alone."""
    if values.dtype == dtype:
        return values
    parts = range(0, len(values), SERIAL_VALUES)
    return torch.cat([values[first : first + SERIAL_VALUES].to(dtype) for first in parts])


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, contiguous and of the same data type and length, have the same bytes."""
    length = ctypes.c_size_t(a.nbytes)
    return _libc.memcmp(ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()), length) == 0
