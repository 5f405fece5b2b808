"""A local file on its way to an object store."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import FileEntry, check_crc
from cairn.run.files import naming

OnBytes = Callable[[int], None]
BLOCK_BYTES = 256 << 10
"""Bytes that are read, checked and sent at a time, while they are in the processor's cache."""

Chunk = tuple[int, int]
"""CRC-64/NVME of a chunk, and its size in bytes."""


def chunks_of(entry: FileEntry, numbers: range | None = None) -> list[Chunk]:
    """The chunks of a file, or some of them, from its manifest."""
    return [
        (int(entry.crc64nvme[n], 16), min(CHUNK_BYTES, entry.size - n * CHUNK_BYTES))
        for n in (range(len(entry.crc64nvme)) if numbers is None else numbers)
    ]


@dataclass(frozen=True)
class ObjectRange:
    """Where bytes lie: in the object `name` below `url`, from the byte `first` on."""

    url: str
    name: str
    first: int


class UploadBody:
    """A file of a step, of which every chunk is compared with the manifest before it is sent.

    Args:
        pace: called before each block is sent, with its number of bytes; it may wait.
        on_bytes: called when bytes have arrived, or need not be sent.
        guard: called right before the object appears (if not in S3: before its first byte is sent); an error
            that it raises ends the upload.
        known: says where the object store has some chunks already.
    """

    def __init__(
        self,
        path: Path,
        entry: FileEntry,
        *,
        pace: OnBytes = lambda count: None,
        on_bytes: OnBytes = lambda count: None,
        guard: Callable[[], None] = lambda: None,
        known: Callable[[Sequence[Chunk]], ObjectRange | None] = lambda chunks: None,
    ):
        self.path = path
        self.entry = entry
        self.pace = pace
        self.on_bytes = on_bytes
        self.guard = guard
        self.known = known

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.entry.size

    def chunks(self, numbers: range) -> list[Chunk]:
        """Checksums and sizes of some chunks, from the manifest."""
        return chunks_of(self.entry, numbers)

    def blocks(self, chunks: range) -> Iterator[memoryview]:
        """The bytes of some chunks, in blocks that are valid until the next one is asked for.

        The last block of a chunk comes only if the chunk is what the manifest says.

        Raises:
            Damaged: it is not.
            OSError: the file can't be read; the error names it.
        """
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with naming(self.path), open(self.path, "rb", buffering=0) as file:
            for chunk in chunks:
                at, end, crc = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.size), 0
                while at < end:
                    count = os.preadv(file.fileno(), [buffer[: end - at]], at)
                    crc, at = crc64(buffer[:count], crc), at + count
                    if at == end or not count:
                        check_crc(self.path, self.entry, chunk, crc)
                    self.pace(count)
                    yield buffer[:count]

    def pieces(self) -> Iterator[bytes]:
        """The chunks in turn, for a store that takes them so."""
        for chunk in range(len(self.entry.crc64nvme)):
            data = b"".join(bytes(block) for block in self.blocks(range(chunk, chunk + 1)))
            yield data
            self.on_bytes(len(data))
