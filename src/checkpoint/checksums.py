"""Checksums of files that several ranks write and read in pieces.

Every chunk of CHUNK_BYTES of a file has a CRC-64/NVME (which S3 also uses for whole objects). CRCs are
linear: the CRC of a chunk is the XOR of the contributions of its pieces, and each piece can be computed by
another process. So ranks that each hold some of a file's bytes get the same checksums whatever their number,
without exchanging data, and a reader verifies the file with the bytes that its ranks read anyway.
"""

from collections.abc import Mapping
from pathlib import Path

from awscrt import checksums as crt  # pyright: ignore[reportMissingTypeStubs] # it is typed in its code

CHUNK_BYTES = 16 << 20
READ_BYTES = 1 << 20  # stays in the processor's cache between reading and checksumming


def crc64(data: memoryview | bytes, previous: int = 0) -> int:
    """The CRC-64/NVME of `data`, continuing after bytes whose CRC is `previous`."""
    return crt.crc64nvme(data, previous)  # pyright: ignore[reportArgumentType] # it takes any buffer


class FileChecksum:
    """The contributions of some pieces of a file to the CRCs of its chunks.

    `crcs` maps chunk numbers to contributions so far; `nbytes` counts the bytes that were added.
    """

    def __init__(self, size: int, crcs: dict[int, int] | None = None, nbytes: int = 0):
        self.size = size
        self.crcs = crcs or {}
        self.nbytes = nbytes

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
