"""Checksums of files that several ranks write and read in pieces.

Every chunk of CHUNK_BYTES of a file has a CRC-64/NVME (which S3 also uses for whole objects). CRCs are
linear: the CRC of a chunk is the XOR of the contributions of its pieces, and each piece can be computed by
another process. So ranks that each hold some of a file's bytes get the same checksums whatever their number,
without exchanging data, and a reader verifies the file with the bytes that its ranks read anyway.
"""

import bisect
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

from awscrt import checksums as crt  # pyright: ignore[reportMissingTypeStubs] # it is typed in its code

from cairn.run.files import read_note

CHUNK_BYTES = 16 << 20
READ_BYTES = 1 << 20  # stays in the processor's cache between reading and checksumming


def crc64(data: memoryview | bytes, previous: int = 0) -> int:
    """The CRC-64/NVME of `data`, continuing after bytes whose CRC is `previous`."""
    return crt.crc64nvme(data, previous)  # pyright: ignore[reportArgumentType] # it takes any buffer


def join_crcs(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC of bytes in a row, from the CRC and the number of bytes of each piece."""
    joined = 0
    for crc, nbytes in pieces:
        joined = crt.combine_crc64nvme(joined, crc, nbytes)
    return joined


@dataclass(frozen=True)
class Crc:
    """A kind of CRC.

    of: the CRC of bytes, continuing after bytes whose CRC is given. joined: the CRC of bytes of which the
    first have the first CRC, and the others, whose number is given, the second.
    """

    of: Callable[[memoryview, int], int]
    joined: Callable[[int, int, int], int]


CRC64 = Crc(crc64, crt.combine_crc64nvme)
ZIP_CRC32 = Crc(zlib.crc32, crt.combine_crc32)
"""That of ZIP archives. zlib's is faster than awscrt's, which uses no vector instructions here."""


class SpanSum:
    """The CRC of a span of bytes that arrive in parts, in any order and from any thread.

    Bytes that arrive again do not count: it is the CRC of those that came first.
    """

    def __init__(self, nbytes: int, kind: Crc = CRC64):
        self.nbytes = nbytes
        self._kind = kind
        self._lock = threading.Lock()
        self._crc = 0
        self._left = nbytes
        self._gaps: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def add(self, first: int, data: memoryview) -> int | None:
        """Add the bytes from `first` on; returns `value` if they were the last that were missing."""
        with self._lock:
            fresh = self._take(first, first + len(data))
        crc, count = 0, 0
        for low, high in fresh:
            part = self._kind.of(data[low - first : high - first], 0)
            crc ^= self._kind.joined(part, 0, self.nbytes - high)
            count += high - low
        with self._lock:
            self._crc ^= crc
            self._left -= count
            return self._crc if count and not self._left else None

    def value(self) -> int | None:
        """The CRC; None while bytes are missing."""
        with self._lock:
            return None if self._left else self._crc

    def gaps(self) -> list[tuple[int, int]]:
        """First byte and end of each run of bytes that have not arrived yet."""
        with self._lock:
            return list(self._gaps)

    def _take(self, low: int, high: int) -> list[tuple[int, int]]:
        """Remove a range from the gaps; returns what of it was in them."""
        if low >= high:
            return []
        begin = bisect.bisect_right(self._gaps, low, key=lambda gap: gap[1])
        end = bisect.bisect_left(self._gaps, high, key=lambda gap: gap[0])
        touched = self._gaps[begin:end]
        if not touched:
            return []
        kept = [(touched[0][0], low), (high, touched[-1][1])]
        self._gaps[begin:end] = [gap for gap in kept if gap[0] < gap[1]]
        return [(max(low, first), min(high, last)) for first, last in touched]


class FileChecksum:
    """The contributions of some pieces of a file to the CRCs of its chunks.

    `crcs` maps chunk numbers to contributions so far; `nbytes` counts the bytes that were added.
    """

    def __init__(self, size: int, crcs: dict[int, int] | None = None, nbytes: int = 0):
        self.size = size
        self.crcs = crcs or {}
        self.nbytes = nbytes

    @classmethod
    def of(cls, content: bytes) -> "FileChecksum":
        """That of a file with this content."""
        checksum = cls(len(content))
        checksum.add(0, content)
        return checksum

    @classmethod
    def read(cls, path: Path) -> "FileChecksum":
        """That of a file as it is now, which is read.

        Raises:
            OSError: it can't be read.
        """
        size = path.stat().st_size
        return cls(size, {chunk: chunk_crc(path, chunk) for chunk in range(-(-size // CHUNK_BYTES))}, size)

    def add(self, offset: int, data: memoryview | bytes) -> None:
        """Add `data`, which is at `offset` in the file."""
        view = memoryview(data)
        while view:
            piece = view[: CHUNK_BYTES - offset % CHUNK_BYTES]
            self.add_crc(offset, len(piece), crc64(piece))
            offset += len(piece)
            view = view[len(piece) :]

    def add_crc(self, offset: int, nbytes: int, crc: int) -> None:
        """Add `nbytes` bytes at `offset` by their CRC; they must lie within one chunk."""
        chunk = offset // CHUNK_BYTES
        end = min((chunk + 1) * CHUNK_BYTES, self.size)
        self.crcs[chunk] = self.crcs.get(chunk, 0) ^ crt.combine_crc64nvme(crc, 0, end - offset - nbytes)
        self.nbytes += nbytes

    def merge(self, other: "FileChecksum") -> None:
        """Add the contributions that another process has computed for the same file."""
        for chunk, crc in other.crcs.items():
            self.crcs[chunk] = self.crcs.get(chunk, 0) ^ crc
        self.nbytes += other.nbytes

    def chunks(self) -> list[int]:
        """The CRC of each chunk, once every byte has been added.

        Raises:
            ValueError: some bytes are missing, or were added twice.
        """
        if self.nbytes != self.size:
            raise ValueError(f"{self.nbytes} bytes of a file of {self.size} were checksummed")
        return [self.crcs.get(chunk, 0) for chunk in range(-(-self.size // CHUNK_BYTES))]


def merge_checksums(into: dict[str, FileChecksum], more: Mapping[str, FileChecksum]) -> None:
    """Add the contributions of another process to those in `into`, by file name."""
    for name, checksum in more.items():
        into.setdefault(name, FileChecksum(checksum.size)).merge(checksum)


def chunk_crc(path: Path, chunk: int) -> int:
    """The CRC of one chunk of a file on disk."""
    buffer = bytearray(READ_BYTES)
    crc, left = 0, CHUNK_BYTES
    with open(path, "rb", buffering=0) as file:
        file.seek(chunk * CHUNK_BYTES)
        while left and (count := file.readinto(memoryview(buffer)[:left])):
            crc = crc64(memoryview(buffer)[:count], crc)
            left -= count
    return crc


# Receipts: a process's list of the files that it wrote for a step, kept until the step is committed. A
# receipt is the file `.<name>.part.json` in the step's folder. It names its author (a start of the trainer,
# or an attempt of the run) and the author's contributions to the checksums of each file.


class _Written(TypedDict):
    """One file: its size, the number of bytes that the process wrote, and their (chunk, CRC) pairs."""

    size: int
    nbytes: int
    crcs: list[tuple[int, str]]


class Receipt(TypedDict):
    """The content of a receipt file."""

    attempt: str
    files: dict[str, _Written]
    contents: NotRequired[dict[str, _Written]]
    """Of files that were packed: what was packed of them."""


def make_receipt(
    attempt: str,
    files: Mapping[str, FileChecksum],
    contents: Mapping[str, FileChecksum] = MappingProxyType({}),
) -> Receipt:
    """The receipt of `attempt` for the checksums that it computed while writing.

    Args:
        contents: those of files that it packed.
    """
    receipt: Receipt = {"attempt": attempt, "files": _entries(files)}
    if contents:
        receipt["contents"] = _entries(contents)
    return receipt


def _entries(files: Mapping[str, FileChecksum]) -> dict[str, _Written]:
    return {
        name: {
            "size": file.size,
            "nbytes": file.nbytes,
            "crcs": [(chunk, f"{crc:016x}") for chunk, crc in file.crcs.items()],
        }
        for name, file in files.items()
    }


def read_receipt(content: dict[str, Any], kind: str = "files") -> dict[str, FileChecksum]:
    """The checksums in a receipt: of `files`, or of packed files' `contents`."""
    return {
        name: FileChecksum(entry["size"], {k: int(v, 16) for k, v in entry["crcs"]}, entry["nbytes"])
        for name, entry in content.get(kind, {}).items()
    }


def note_of(attempt: str, path: Path) -> dict[str, Any] | None:
    """The content of a receipt or another note in a step's folder, if there is one of this attempt."""
    content = read_note(path, dict[str, Any])
    return content if content and content.get("attempt") == attempt else None
