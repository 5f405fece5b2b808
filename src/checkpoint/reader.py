"""Reads ranges of files into tensors, with several threads, and computes checksums on the way.

Bytes in the page cache are copied from there straight into the tensors. Other bytes are read with O_DIRECT, 2
MiB at a time, into a buffer that stays in the CPU's cache: this takes far less CPU time than filling the page
cache, and a checkpoint is loaded only once.
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
from cairn.checkpoint.packed import Block as PackedBlock
from cairn.checkpoint.packed import PackedFile

READERS = 3
"""Threads per rank."""
STREAM_BYTES = CHUNK_BYTES
"""Bytes that one thread reads in sequence. Threads read neighbouring stretches at any time, since disks,
above all virtual ones, are slower where reads go back and forth between distant places."""
SHORTEST_STREAM = 1 << 20
BLOCK_BYTES = 512 << 10
"""Bytes per checksum call: few enough to be still in the CPU's cache after they were copied."""
DIRECT_BYTES = 2 << 20
"""Bytes per read with O_DIRECT."""
DIRECT_FROM = 256 << 10
"""Shorter reads go through the page cache."""
ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Alignment of reads with O_DIRECT, in bytes."""
MAX_BUFFERS = 512
"""Maximum buffers of one readv; systems allow at least 1024."""
Block = list[memoryview]
"""Buffers to fill with consecutive bytes of a file."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Piece:
    """A range of a file to read into a tensor.

    dtype: data type in the file. target: contiguous, one-dimensional, possibly of another data type. counted:
    whether the range counts in the checksums that `read_pieces` returns. packed: where the file's bytes are,
    if it is packed.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    target: torch.Tensor
    counted: bool = True
    packed: PackedFile | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
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


def read_pieces(pieces: Iterable[Piece]) -> dict[Path, FileChecksum]:
    """Fill the targets of all pieces; returns, by file, the checksum contributions of the counted pieces.

    Checksums are computed while the bytes are in the CPU's cache; adjacent pieces of a file are read
    together. A packed block of which several pieces hold a part is unpacked once. Checksums of packed files
    are those of their contents.

    Raises:
        Damaged: a file ends too early, or a block can't be unpacked.
    """
    pieces = list(pieces)
    packed = [piece for piece in pieces if piece.nbytes and piece.packed]
    pieces = [piece for piece in pieces if piece.nbytes and not piece.packed]
    seen = {piece.path: FileChecksum(piece.packed.size) for piece in packed if piece.packed}
    with contextlib.ExitStack() as closing:
        files = {path: closing.enter_context(_File(path)) for path in {piece.path for piece in pieces}}
        pool = closing.enter_context(ThreadPoolExecutor(READERS))
        closing.callback(pool.shutdown, cancel_futures=True)
        jobs = [pool.submit(_read, files[stream[0].path], stream) for stream in _streams(pieces)]
        jobs += [pool.submit(_unpack, block, parts) for block, parts in _by_block(packed)]
        for path, file in files.items():
            seen[path] = FileChecksum(file.size)
        for job in jobs:
            path, sums = job.result()
            for offset, nbytes, crc in sums:
                seen[path].add_crc(offset, nbytes, crc)
    return seen


_libc = ctypes.CDLL(None, use_errno=True)


class _File:
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

    def __enter__(self) -> "_File":
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
        """uint8 [DIRECT_BYTES], aligned to pages."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(-1, DIRECT_BYTES), np.uint8)
        return self._memory


_own = _Own()


class _Window:
    """A range of a file, from `offset` to `end`, that one thread reads into buffers, block after block."""

    def __init__(self, file: _File, offset: int, buffers: Iterable[torch.Tensor]):
        self.file = file
        self.offset = offset
        self._targets = deque(as_memory(buffer) for buffer in buffers)
        self.end = offset + sum(map(len, self._targets))
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
        if (
            self.file.direct_fd is None
            or self.offset < self._through_cache_until
            or self.end - self.offset < DIRECT_FROM
        ):
            return False
        start, stop = self._next_direct()
        if self.file.is_cached(start, stop):
            self._through_cache_until = stop
            return False
        return True

    def _next_direct(self) -> tuple[int, int]:
        """First and last offset of the next read with O_DIRECT, both aligned."""
        start = self.offset // ALIGNMENT * ALIGNMENT
        stop = (start // DIRECT_BYTES + 1) * DIRECT_BYTES
        return start, min(stop, -(-self.end // ALIGNMENT) * ALIGNMENT)

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


def _streams(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Groups adjacent pieces; each group lies within one stretch of a file, which one thread reads.

    A stretch is STREAM_BYTES long, or shorter if there would be too few of them to keep all threads busy.
    """
    stretch, total = STREAM_BYTES, sum(piece.nbytes for piece in pieces)
    while stretch > SHORTEST_STREAM and total < 4 * READERS * stretch:
        stretch //= 2
    stream: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.offset)):
        for part in _cut(piece, stretch):
            same = stream and part.offset // stretch == stream[0].offset // stretch
            if stream and not (same and _follows(part, stream[-1])):
                yield stream
                stream = []
            stream.append(part)
    if stream:
        yield stream


def _cut(piece: Piece, stretch: int) -> Iterator[Piece]:
    """Cut a piece where a stretch of the file ends, or just behind it where a value spans two stretches."""
    size, count = piece.dtype.itemsize, piece.target.numel()
    first = 0
    while first < count:
        offset = piece.offset + first * size
        last = min(first + -(-(stretch - offset % stretch) // size), count)
        yield replace(piece, offset=offset, target=piece.target[first:last])
        first = last


def _follows(piece: Piece, before: Piece) -> bool:
    same = piece.path == before.path and piece.counted == before.counted
    return same and piece.offset == before.offset + before.nbytes


def _read(file: _File, stream: list[Piece]) -> tuple[Path, list[tuple[int, int, int]]]:
    """Read adjacent pieces; returns the file and the (offset, bytes, CRC) of counted ranges, by chunk."""
    first = stream[0]
    buffers = [p.target if p.in_place else torch.empty(p.target.shape, dtype=p.dtype) for p in stream]
    window = _Window(file, first.offset, buffers)
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


def _by_block(pieces: list[Piece]) -> Iterator[tuple[PackedBlock, list[Piece]]]:
    """The blocks that hold some of the pieces, and the pieces' parts in each.

    A value that lies in two blocks, which our own files do not have, is in the part of the first.
    """
    blocks: dict[PackedBlock, list[Piece]] = {}
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


def _unpack(block: PackedBlock, parts: list[Piece]) -> tuple[Path, list[tuple[int, int, int]]]:
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
        buffer = part.target if part.in_place else torch.empty(part.target.shape, dtype=part.dtype)
        as_memory(buffer)[:] = within
        if not part.in_place:
            part.target.copy_(buffer)
        begin = part.offset
        while part.counted and within:
            piece = within[: CHUNK_BYTES - begin % CHUNK_BYTES]
            sums.append((begin, len(piece), crc64(piece)))
            begin, within = begin + len(piece), within[len(piece) :]
    return parts[0].path, sums
