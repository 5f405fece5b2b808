"""Ranges of files, read straight into tensors by several threads and checksummed on the way."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cairn.checkpoint.checksums import CHUNK_BYTES, READ_BYTES, FileChecksum, crc64
from cairn.checkpoint.manifest import Damaged

READERS = 3  # threads of each rank
STREAM_BYTES = 64 << 20  # what a thread reads in a row: long enough for the kernel to read ahead
MAX_BUFFERS = 512  # of one read; systems allow at least 1024


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
    return memoryview(as_bytes(tensor).numpy())  # pyright: ignore[reportArgumentType] # numpy before 3.12


def read_pieces(pieces: Iterable[Piece]) -> dict[Path, FileChecksum]:
    """Fill the targets of all pieces. Returns what the counted ones contribute to their files' checksums.

    Bytes are checksummed while they are still in the processor's cache, and pieces that follow each other in
    a file are read together.

    Raises:
        Damaged: a file ends too early.
    """
    pieces = [piece for piece in pieces if piece.nbytes]
    seen: dict[Path, FileChecksum] = {}
    with ThreadPoolExecutor(READERS) as pool:
        fds = {path: os.open(path, os.O_RDONLY) for path in {piece.path for piece in pieces}}
        try:
            jobs = [pool.submit(_read, fds[stream[0].path], stream) for stream in _streams(pieces)]
            for path, fd in fds.items():
                seen[path] = FileChecksum(os.fstat(fd).st_size)
            for job in jobs:
                path, sums = job.result()
                for offset, nbytes, crc in sums:
                    seen[path].add_crc(offset, nbytes, crc)
        finally:
            pool.shutdown(cancel_futures=True)
            for fd in fds.values():
                os.close(fd)
    return seen


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
    parts = piece.target.split(nbytes // piece.dtype.itemsize)
    return [
        replace(piece, offset=piece.offset + number * parts[0].numel() * piece.dtype.itemsize, target=part)
        for number, part in enumerate(parts)
    ]


def _follows(piece: Piece, before: Piece) -> bool:
    same = piece.path == before.path and piece.counted == before.counted
    return same and piece.offset == before.offset + before.nbytes


def _read(fd: int, stream: list[Piece]) -> tuple[Path, list[tuple[int, int, int]]]:
    """Read pieces that follow each other: the file, and (offset, bytes, CRC) of what counts, by chunk."""
    first = stream[0]
    buffers = [p.target if p.in_place else torch.empty(p.target.shape, dtype=p.dtype) for p in stream]
    sums: list[tuple[int, int, int]] = []
    begin = position = first.offset
    crc = 0
    for block in _blocks(buffers, first.offset):
        _fill(fd, block, position, first.path)
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


def _blocks(buffers: list[torch.Tensor], offset: int) -> Iterator[list[memoryview]]:
    """The memory to fill with each read; reads end at multiples of READ_BYTES, so where chunks end."""
    block: list[memoryview] = []
    for buffer in buffers:
        view = as_memory(buffer)
        while view:
            part = view[: READ_BYTES - offset % READ_BYTES]
            block.append(part)
            offset += len(part)
            view = view[len(part) :]
            if offset % READ_BYTES == 0 or len(block) == MAX_BUFFERS:
                yield block
                block = []
    if block:
        yield block


def _fill(fd: int, block: list[memoryview], offset: int, path: Path) -> None:
    while block:
        count = os.preadv(fd, block, offset)
        if count == 0:
            raise Damaged(f"{path}: ends at byte {offset}, and more should be there")
        offset += count
        while block and count >= len(block[0]):
            count -= len(block[0])
            block = block[1:]
        if count:
            block = [block[0][count:], *block[1:]]
