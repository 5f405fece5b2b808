"""A local file on its way to an object store, and the local note of what of it has arrived there."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import FileEntry, Manifest, check_crc
from cairn.run.files import naming, sync

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


# What a process that was killed has uploaded already.


SYNC_SECONDS = 5.0
"""How much of the newest notes a power cut may take; what they list is then sent again."""


@dataclass
class UnfinishedUpload:
    """What is known of an unfinished upload of one file.

    upload: its id; None if there is none. part_bytes: the size of a part. parts: by number, counted from 1,
    the ETag and the CRC-64/NVME of each part that has arrived.
    """

    upload: str | None = None
    part_bytes: int = 0
    parts: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])


@dataclass(frozen=True)
class Listing:
    """Files of a folder that is no step, with their checksums, by name in it."""

    files: Mapping[str, FileEntry]

    def to_json(self) -> bytes:
        return json.dumps({name: entry.model_dump() for name, entry in self.files.items()}).encode()


class Sent:
    """A local note of the files of a step, and of the parts of large files, that were sent.

    A later process need not send them again. The note counts for one manifest only. Objects are noted with
    their ETags: another attempt's step of the same number may have replaced them since.

    Args:
        path: the file of the note; a line that was cut is ignored.
        manifest: the step's, or what lists the files of another folder.
    """

    def __init__(self, path: Path, manifest: Manifest | Listing):
        self.path = path
        self._writing = threading.Lock()
        self._synced = time.monotonic()
        self._files: dict[str, str | None] = {}
        self.uploads: dict[str, UnfinishedUpload] = {}
        """Unfinished uploads by the names of files."""
        title = f"{crc64(memoryview(manifest.to_json())):016x}"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if lines[:1] == [title]:
            for line in lines[1:]:
                self._take(line)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{title}\n")
            sync(path)
            sync(path.parent)

    def _take(self, line: str) -> None:
        """Read one line; those of files without an ETag, which older versions wrote, prove nothing."""
        try:
            row = json.loads(line)
            if "etag" in row and "part" not in row:
                self._files[row["file"]] = row["etag"]
                # Completing it again is no error in S3, and would not bring back what was replaced since.
                self.uploads.pop(row["file"], None)
            elif "upload" in row:
                self.uploads[row["file"]] = UnfinishedUpload(row["upload"], int(row["part_bytes"]))
            elif "part" in row:
                parts = self.uploads[row["file"]].parts
                parts[int(row["part"])] = str(row["etag"]), int(row["crc64nvme"], 16)
        except (ValueError, TypeError, KeyError):
            pass

    def etag(self, name: str) -> str | None:
        """The ETag that the object of this file had when it was sent; None if it was not, or is not known."""
        return self._files.get(name)

    def add(self, name: str, etag: str | None) -> None:
        """Note that the file was sent, and the ETag of its object, if that is known."""
        self._files[name] = etag
        self.uploads.pop(name, None)
        self.append(json.dumps({"file": name, "etag": etag}))

    def parts(self, name: str) -> "SentParts":
        """The notes about the parts of one file."""
        return SentParts(self, name)

    def remove(self) -> None:
        """Remove the note, once the step is committed."""
        self.path.unlink(missing_ok=True)

    def append(self, line: str, *, at_once: bool = False) -> None:
        """Write a line, which survives the process, and a power cut, at once or some seconds later."""
        with self._writing, open(self.path, "a") as file:
            file.write(f"{line}\n")
            file.flush()
            if at_once or time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(file.fileno())
                self._synced = time.monotonic()


class SentParts:
    """The notes about the parts of one file."""

    def __init__(self, sent: Sent, name: str):
        self._sent = sent
        self._name = name

    def noted(self) -> UnfinishedUpload:
        """What is known of the file's upload."""
        return self._sent.uploads.get(self._name) or UnfinishedUpload()

    def begin(self, upload: str | None, part_bytes: int = 0) -> None:
        """Note that an upload has begun; the earlier one and its parts count no more."""
        self._sent.uploads[self._name] = UnfinishedUpload(upload, part_bytes)
        self._append({"upload": upload, "part_bytes": part_bytes}, at_once=True)

    def add(self, part: int, etag: str, crc: int) -> None:
        self.noted().parts[part] = etag, crc
        self._append({"part": part, "etag": etag, "crc64nvme": f"{crc:016x}"})

    def _append(self, row: dict[str, Any], *, at_once: bool = False) -> None:
        self._sent.append(json.dumps({"file": self._name, **row}), at_once=at_once)
