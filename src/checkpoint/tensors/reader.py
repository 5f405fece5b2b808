"""Reads ranges of files into tensors, with several threads, and computes checksums on the way.

Here are also the data types in tensor files, by the names that safetensors and torch give them.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, crc64
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.compression import Block as PackedBlock
from cairn.checkpoint.tensors.compression import PackedFile
from cairn.checkpoint.tensors.remote_ranges import READERS as AWAY_READERS
from cairn.checkpoint.tensors.remote_ranges import AwayFile

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
"""safetensors' name of each torch data type."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The torch data type by safetensors' name."""
DTYPES_IN_SETTINGS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
"""The torch data type by torch's name, such as float32; used in settings and in messages between roles."""


# Ranges of files, read block after block into buffers that the caller has.


BLOCK_BYTES = 512 << 10
"""Bytes per checksum call: few enough to be still in the CPU's cache after they were copied."""
DIRECT_BYTES = 2 << 20
"""Bytes per read with O_DIRECT."""
DIRECT_FROM = 256 << 10
"""Shorter ranges are read through the page cache."""
ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Alignment of reads with O_DIRECT, in bytes."""
MAX_BUFFERS = 512
"""Maximum buffers of one readv; systems allow at least 1024."""
Block = list[memoryview]
"""Buffers to fill with consecutive bytes of a file."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


_libc = ctypes.CDLL(None, use_errno=True)


class File:
    """An open file that several threads read; a context manager."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size
        self.direct_fd: int | None = None
        """Descriptor with O_DIRECT; None if the file system doesn't support that."""
        with contextlib.suppress(OSError):
            self.direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._address = 0
        if self.size >= DIRECT_FROM:
            self._mapped = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)  # takes no memory, is not read
            self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data

    def __enter__(self) -> "File":
        return self

    def is_cached(self, start: int, end: int) -> bool:
        """Whether a range that begins at a page is in the page cache; True if that can't be found out."""
        if not self._address:
            return True
        end = min(end, self.size)
        pages = np.zeros(max(-(-(end - start) // mmap.PAGESIZE), 0), np.uint8)
        where, nbytes = ctypes.c_void_p(self._address + start), ctypes.c_size_t(max(end - start, 0))
        failed = _libc.mincore(where, nbytes, ctypes.c_void_p(pages.ctypes.data)) != 0
        return failed or bool(np.all(pages & 1))

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)


class _Own(threading.local):
    """A thread's own buffer, kept from one window to the next."""

    def __init__(self) -> None:
        self._memory: Bytes | None = None

    def memory(self) -> Bytes:
        """uint8 [DIRECT_BYTES + 2 * ALIGNMENT], aligned to pages."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(-1, DIRECT_BYTES + 2 * ALIGNMENT), np.uint8)
        return self._memory


_own = _Own()


class Window:
    """A range of a file, from `offset` to `end`, that one thread reads into buffers, block after block."""

    def __init__(self, file: File, offset: int, buffers: Iterable[memoryview]):
        self.file = file
        self.offset = offset
        self._targets = deque(buffers)
        self.end = offset + sum(map(len, self._targets))
        self._is_long = self.end - offset >= DIRECT_FROM
        self._held: Bytes = np.empty(0, np.uint8)
        """Bytes that were read ahead with O_DIRECT."""
        self._through_cache_until = 0
        """Offset up to which reads go through the page cache."""

    def fill_block(self) -> Block:
        """Fill the next block of the buffers, which ends at the next multiple of BLOCK_BYTES; returns it.

        Raises:
            Damaged: the file ends too early.
        """
        block = self._take(BLOCK_BYTES - self.offset % BLOCK_BYTES)
        left = block
        while left:
            if not len(self._held) and self._goes_direct():
                self._read_ahead()
            count = (
                self._copy_held(left[0]) if len(self._held) else os.preadv(self.file.fd, left, self.offset)
            )
            if count == 0:
                raise Damaged(f"{self.file.path}: ends at byte {self.offset}, but should be longer")
            self.offset += count
            left = _after(left, count)
        return block

    def _take(self, nbytes: int) -> Block:
        """The next `nbytes` of the buffers, or less."""
        block: Block = []
        while nbytes and self._targets and len(block) < MAX_BUFFERS:
            view = self._targets[0]
            if len(view) > nbytes:
                block.append(view[:nbytes])
                self._targets[0] = view[nbytes:]
                break
            block.append(self._targets.popleft())
            nbytes -= len(view)
        return block

    def _copy_held(self, view: memoryview) -> int:
        count = min(len(view), len(self._held))
        np.copyto(np.frombuffer(view, np.uint8, count), self._held[:count])
        self._held = self._held[count:]
        return count

    def _goes_direct(self) -> bool:
        """Whether to read the next bytes with O_DIRECT."""
        if self.file.direct_fd is None or self.offset < self._through_cache_until or not self._is_long:
            return False
        start, stop = self._next_direct()
        if self.file.is_cached(start, stop):
            self._through_cache_until = stop
            return False
        return True

    def _next_direct(self) -> tuple[int, int]:
        """First and last offset of the next read with O_DIRECT, both aligned."""
        start = self.offset // ALIGNMENT * ALIGNMENT
        stop, last = start + DIRECT_BYTES, -(-self.end // ALIGNMENT) * ALIGNMENT
        return start, stop if stop + 2 * ALIGNMENT < last else last

    def _read_ahead(self) -> None:
        """Read the next bytes into `_held`; none if the file ends here or O_DIRECT fails."""
        assert self.file.direct_fd is not None
        start, stop = self._next_direct()
        memory = _own.memory()[: stop - start]
        try:
            count = os.preadv(self.file.direct_fd, [memory.data], start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the device needs another alignment
                raise
            self._through_cache_until = stop
            return
        self._held = memory[self.offset - start : max(min(count, self.end - start), self.offset - start)]


def _after(block: Block, count: int) -> Block:
    """A block without its first `count` bytes."""
    while block and count >= len(block[0]):
        count -= len(block[0])
        block = block[1:]
    return [block[0][count:], *block[1:]] if count else block


READERS = 3
"""Threads per rank."""
STREAM_BYTES = CHUNK_BYTES
"""Bytes that one thread reads in sequence. Threads read neighbouring stretches at any time, since disks,
above all virtual ones, are slower where reads go back and forth between distant places."""
SHORTEST_STREAM = 1 << 20
WIDEST_GAP = 4 << 10
"""Of an object, so many bytes between two pieces are read with them: a request of its own takes longer."""


@dataclass(frozen=True)
class ReadRange:
    """A range of a file to read into a tensor.

    dtype: data type in the file. target: contiguous, one-dimensional, possibly of another data type. counted:
    whether the range counts in the checksums that `read_pieces` returns. packed: where the file's bytes are,
    if it is packed. away: the same, if they are in an object store.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    target: torch.Tensor
    counted: bool = True
    packed: PackedFile | None = None
    away: AwayFile | None = None

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether the bytes can be read straight into the target's memory."""
        return self.target.dtype == self.dtype and self.target.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's values as uint8 [nbytes], sharing its memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes."""
    return as_bytes(tensor).numpy().data


def read_pieces(pieces: Iterable[ReadRange]) -> dict[Path, FileChecksum]:
    """Fill the targets of all pieces; returns, by file, the checksum contributions of the counted pieces.

    Checksums are computed while the bytes are in the CPU's cache; adjacent pieces of a file are read
    together. A packed block of which several pieces hold a part is unpacked once. Checksums of packed files
    are those of their contents.

    Raises:
        Damaged: a file ends too early, a block can't be unpacked, or an object store refuses or fails.
    """
    pieces = [piece for piece in pieces if piece.nbytes]
    packed, away = [p for p in pieces if p.packed], [p for p in pieces if p.away]
    seen = {p.path: FileChecksum(whole.size) for p in pieces if (whole := p.packed or p.away)}
    pieces = [piece for piece in pieces if piece.path not in seen]
    with contextlib.ExitStack() as closing:
        files = {path: closing.enter_context(File(path)) for path in {piece.path for piece in pieces}}
        if len(pieces) == 1 and pieces[0].nbytes <= STREAM_BYTES and not packed:
            path, sums = _read(files[pieces[0].path], pieces)  # whoever reads in parts has threads
            seen[path] = FileChecksum(files[path].size)
            for offset, nbytes, crc in sums:
                seen[path].add_crc(offset, nbytes, crc)
            return seen
        pool = closing.enter_context(ThreadPoolExecutor(READERS))
        closing.callback(pool.shutdown, cancel_futures=True)
        jobs = [pool.submit(_read, files[stream[0].path], stream) for stream in _streams(pieces)]
        jobs += [pool.submit(_unpack, block, parts) for block, parts in _by_block(packed)]
        if away:
            network = closing.enter_context(ThreadPoolExecutor(AWAY_READERS))
            closing.callback(network.shutdown, cancel_futures=True)
            jobs += [network.submit(_fetch, parts) for parts in _by_request(away)]
        for path, file in files.items():
            seen[path] = FileChecksum(file.size)
        for job in jobs:
            path, sums = job.result()
            for offset, nbytes, crc in sums:
                seen[path].add_crc(offset, nbytes, crc)
    return seen


def _streams(pieces: list[ReadRange]) -> Iterator[list[ReadRange]]:
    """Groups adjacent pieces; each group lies within one stretch of a file, which one thread reads.

    A stretch is STREAM_BYTES long, or shorter if there would be too few of them to keep all threads busy.
    """
    stretch, total = STREAM_BYTES, sum(piece.nbytes for piece in pieces)
    while stretch > SHORTEST_STREAM and total < 4 * READERS * stretch:
        stretch //= 2
    stream: list[ReadRange] = []
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.offset)):
        for part in _cut(piece, stretch):
            same = stream and part.offset // stretch == stream[0].offset // stretch
            if stream and not (same and _follows(part, stream[-1])):
                yield stream
                stream = []
            stream.append(part)
    if stream:
        yield stream


def _cut(piece: ReadRange, stretch: int) -> Iterator[ReadRange]:
    """Cut a piece where a stretch of the file ends, or just behind it where a value spans two stretches."""
    size, count = piece.dtype.itemsize, piece.target.numel()
    first = 0
    while first < count:
        offset = piece.offset + first * size
        last = min(first + -(-(stretch - offset % stretch) // size), count)
        yield replace(piece, offset=offset, target=piece.target[first:last])
        first = last


def _follows(piece: ReadRange, before: ReadRange) -> bool:
    same = piece.path == before.path and piece.counted == before.counted
    return same and piece.offset == before.offset + before.nbytes


def _read(file: File, stream: list[ReadRange]) -> tuple[Path, list[tuple[int, int, int]]]:
    """Read adjacent pieces; returns the file and the (offset, bytes, CRC) of counted ranges, by chunk."""
    first = stream[0]
    buffers = [p.target if p.in_place else torch.empty(p.target.shape, dtype=p.dtype) for p in stream]
    window = Window(file, first.offset, map(as_memory, buffers))
    sums: list[tuple[int, int, int]] = []
    begin, crc = first.offset, 0
    while window.offset < window.end:
        for view in window.fill_block():
            crc = crc64(view, crc) if first.counted else 0
        if window.offset % CHUNK_BYTES == 0 or window.offset == window.end:
            sums.append((begin, window.offset - begin, crc))
            begin, crc = window.offset, 0
    for piece, buffer in zip(stream, buffers, strict=True):
        if not piece.in_place:
            piece.target.copy_(buffer)
    return first.path, sums if first.counted else []


def _by_block(pieces: list[ReadRange]) -> Iterator[tuple[PackedBlock, list[ReadRange]]]:
    """The blocks that hold some of the pieces, and the pieces' parts in each.

    A value that lies in two blocks, which our own files do not have, is in the part of the first.
    """
    blocks: dict[PackedBlock, list[ReadRange]] = {}
    for piece in pieces:
        assert piece.packed
        size, first = piece.dtype.itemsize, 0
        for block in piece.packed.covering(piece.offset, piece.nbytes):
            last = min(-(-(block.end - piece.offset) // size), piece.target.numel())
            if last > first:
                part = replace(piece, offset=piece.offset + first * size, target=piece.target[first:last])
                blocks.setdefault(block, []).append(part)
            first = max(first, last)
    yield from blocks.items()


def _unpack(block: PackedBlock, parts: list[ReadRange]) -> tuple[Path, list[tuple[int, int, int]]]:
    """Fill parts of pieces from a block; returns what `_read` returns."""
    held = block.read()
    sums: list[tuple[int, int, int]] = []
    for part in parts:
        assert part.packed
        within = held[part.offset - block.offset :][: part.nbytes]
        if len(within) < part.nbytes:  # a value goes on in the next block
            within = memoryview(part.packed.read(part.offset, part.nbytes))
        if len(within) < part.nbytes:
            raise Damaged(f"{part.path}: ends at byte {part.packed.size}, but should be longer")
        sums += _give(part, within)
    return parts[0].path, sums


def _by_request(pieces: list[ReadRange]) -> Iterator[list[ReadRange]]:
    """Groups pieces that one request to an object store brings: parts of a stretch, with small gaps."""
    group: list[ReadRange] = []
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.offset)):
        for part in _cut(piece, STREAM_BYTES):
            near = group and part.path == group[-1].path
            near = near and part.offset <= group[-1].offset + group[-1].nbytes + WIDEST_GAP
            if group and not (near and part.offset // STREAM_BYTES == group[0].offset // STREAM_BYTES):
                yield group
                group = []
            group.append(part)
    if group:
        yield group


def _fetch(parts: list[ReadRange]) -> tuple[Path, list[tuple[int, int, int]]]:
    """Fill pieces from an object store; returns what `_read` returns."""
    first, end = parts[0].offset, max(part.offset + part.nbytes for part in parts)
    away = parts[0].away
    assert away
    held = memoryview(away.read(first, end - first))
    sums: list[tuple[int, int, int]] = []
    for part in parts:
        sums += _give(part, held[part.offset - first :][: part.nbytes])
    return parts[0].path, sums


def _give(part: ReadRange, values: memoryview) -> list[tuple[int, int, int]]:
    """Fill a piece with bytes; returns the (offset, bytes, CRC) of counted ranges, by chunk."""
    buffer = part.target if part.in_place else torch.empty(part.target.shape, dtype=part.dtype)
    as_memory(buffer)[:] = values
    if not part.in_place:
        part.target.copy_(buffer)
    sums: list[tuple[int, int, int]] = []
    begin = part.offset
    while part.counted and values:
        piece = values[: CHUNK_BYTES - begin % CHUNK_BYTES]
        sums.append((begin, len(piece), crc64(piece)))
        begin, values = begin + len(piece), values[len(piece) :]
    return sums
