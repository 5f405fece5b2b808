"""Ranges of files, read into tensors by several threads and checksummed on the way.

What the page cache holds is copied from there straight into the tensors. The rest is read past it, a few MiB
at a time, into a buffer that the processor's cache holds: that takes far less of the processor than filling
the page cache, and a checkpoint is loaded once.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, crc64
from cairn.checkpoint.manifest import Damaged

READERS = 3
"""Threads of each rank."""
STREAM_BYTES = 64 << 20
"""What a thread reads in a row: long enough for the kernel to read ahead."""
BLOCK_BYTES = 256 << 10
"""What is checksummed at once: it is still in the processor's cache after it was copied there."""
DIRECT_BYTES = 4 << 20
"""What is read at once past the page cache."""
DIRECT_FROM = 256 << 10
"""Shorter reads go through the page cache."""
ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Of reads past the page cache."""
MAX_BUFFERS = 512
"""Of one read; systems allow at least 1024."""
Block = list[memoryview]
"""Memory that follows each other in a file."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Piece:
    """A range of a file that belongs into a tensor.

    dtype: of what is stored. target: contiguous, one dimension, perhaps of another data type. counted:
    whether the range is part of the checksums that `read_pieces` returns.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    target: torch.Tensor
    counted: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether the target's memory takes the file's bytes as they are."""
        return self.target.dtype == self.dtype and self.target.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous tensor as uint8 [nbytes], sharing its memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return as_bytes(tensor).numpy().data


def read_pieces(pieces: Iterable[Piece]) -> dict[Path, FileChecksum]:
    """Fill the targets of all pieces. Returns what the counted ones contribute to their files' checksums.

    Bytes are checksummed while they are still in the processor's cache, and pieces that follow each other in
    a file are read together.

    Raises:
        Damaged: a file ends too early.
    """
    pieces = [piece for piece in pieces if piece.nbytes]
    seen: dict[Path, FileChecksum] = {}
    with contextlib.ExitStack() as closing:
        files = {path: closing.enter_context(_File(path)) for path in {piece.path for piece in pieces}}
        pool = closing.enter_context(ThreadPoolExecutor(READERS))
        closing.callback(pool.shutdown, cancel_futures=True)
        jobs = [pool.submit(_read, files[stream[0].path], stream) for stream in _streams(pieces)]
        for path, file in files.items():
            seen[path] = FileChecksum(file.size)
        for job in jobs:
            path, sums = job.result()
            for offset, nbytes, crc in sums:
                seen[path].add_crc(offset, nbytes, crc)
    return seen


_libc = ctypes.CDLL(None, use_errno=True)


class _File:
    """An open file that several threads read, as a context manager."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size
        self.direct_fd: int | None = None
        """For reads past the page cache, where the file system has them."""
        with contextlib.suppress(OSError):
            self.direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._address = 0
        if self.size >= DIRECT_FROM:
            self._mapped = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)  # takes no memory, is not read
            self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data

    def __enter__(self) -> "_File":
        return self

    def is_cached(self, start: int, end: int) -> bool:
        """Whether the page cache holds all of a range that begins at a page, or there is no saying."""
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
    """What a thread keeps from one window to the next."""

    def __init__(self) -> None:
        self._memory: Bytes | None = None

    def memory(self) -> Bytes:
        """uint8 [DIRECT_BYTES], aligned to pages."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(-1, DIRECT_BYTES), np.uint8)
        return self._memory


_own = _Own()


class _Window:
    """What one thread reads of a file from `offset` to `end`, block after block."""

    def __init__(self, file: _File, offset: int, end: int):
        self.file = file
        self.offset = offset
        self.end = end
        self._held: Bytes = np.empty(0, np.uint8)
        """What was read ahead, past the page cache."""
        self._cached_until = 0
        """The page cache had everything from here to there."""

    def fill(self, block: Block) -> None:
        """Read what follows into this memory.

        Raises:
            Damaged: the file ends too early.
        """
        while block:
            count = self._take_held(block) if len(self._held) else self._read(block)
            if count == 0 and not len(self._held):
                raise Damaged(f"{self.file.path}: ends at byte {self.offset}, and more should be there")
            self.offset += count
            while block and count >= len(block[0]):
                count -= len(block[0])
                block = block[1:]
            if count:
                block = [block[0][count:], *block[1:]]

    def _take_held(self, block: Block) -> int:
        count = min(len(block[0]), len(self._held))
        np.copyto(np.frombuffer(block[0][:count], np.uint8), self._held[:count])
        self._held = self._held[count:]
        return count

    def _read(self, block: Block) -> int:
        """Bytes that were read into the block; 0 at the end of the file, or where they are held now."""
        file, start = self.file, self.offset // ALIGNMENT * ALIGNMENT
        if file.direct_fd is None or self.end - self.offset < DIRECT_FROM or self.offset < self._cached_until:
            return os.preadv(file.fd, block, self.offset)
        end = min(start + DIRECT_BYTES, self.end)
        if file.is_cached(start, end):
            self._cached_until = end
            return os.preadv(file.fd, block, self.offset)
        wanted = min(-(-(self.end - start) // ALIGNMENT) * ALIGNMENT, DIRECT_BYTES)
        memory = _own.memory()[:wanted]
        try:
            count = os.preadv(file.direct_fd, [memory.data], start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # another alignment than ours, say
                raise
            return os.preadv(file.fd, block, self.offset)
        self._held = memory[self.offset - start : min(count, self.end - start)]
        return 0


def _streams(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces that follow each other without a gap, as much as one thread should read in a row."""
    limit = min(STREAM_BYTES, max(sum(piece.nbytes for piece in pieces) // (4 * READERS), CHUNK_BYTES))
    stream: list[Piece] = []
    filled = 0
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.offset)):
        for part in _cut(piece, limit):
            if stream and (filled + part.nbytes > limit or not _follows(part, stream[-1])):
                yield stream
                stream, filled = [], 0
            stream.append(part)
            filled += part.nbytes
    if stream:
        yield stream


def _cut(piece: Piece, nbytes: int) -> list[Piece]:
    """Parts of a piece of at most that many bytes each."""
    if piece.nbytes <= nbytes:
        return [piece]
    count = nbytes // piece.dtype.itemsize
    return [
        replace(piece, offset=piece.offset + i * piece.dtype.itemsize, target=piece.target[i : i + count])
        for i in range(0, piece.target.numel(), count)
    ]


def _follows(piece: Piece, before: Piece) -> bool:
    same = piece.path == before.path and piece.counted == before.counted
    return same and piece.offset == before.offset + before.nbytes


def _read(file: _File, stream: list[Piece]) -> tuple[Path, list[tuple[int, int, int]]]:
    """Read pieces that follow each other: the file, and (offset, bytes, CRC) of what counts, by chunk."""
    first, last = stream[0], stream[-1]
    buffers = [p.target if p.in_place else torch.empty(p.target.shape, dtype=p.dtype) for p in stream]
    window = _Window(file, first.offset, last.offset + last.nbytes)
    sums: list[tuple[int, int, int]] = []
    begin = position = first.offset
    crc = 0
    for block in _blocks(buffers, first.offset):
        window.fill(block)
        position += sum(map(len, block))
        if first.counted:
            for view in block:
                crc = crc64(view, crc)
            if position % CHUNK_BYTES == 0:
                sums.append((begin, position - begin, crc))
                begin, crc = position, 0
    if first.counted and position > begin:
        sums.append((begin, position - begin, crc))
    for piece, buffer in zip(stream, buffers, strict=True):
        if not piece.in_place:
            piece.target.copy_(buffer)
    return first.path, sums


def _blocks(buffers: list[torch.Tensor], offset: int) -> Iterator[Block]:
    """The memory to fill with each read; reads end at multiples of BLOCK_BYTES, so where chunks end."""
    block: Block = []
    for buffer in buffers:
        view = as_memory(buffer)
        while view:
            part = view[: BLOCK_BYTES - offset % BLOCK_BYTES]
            block.append(part)
            offset += len(part)
            view = view[len(part) :]
            if offset % BLOCK_BYTES == 0 or len(block) == MAX_BUFFERS:
                yield block
                block = []
    if block:
        yield block
