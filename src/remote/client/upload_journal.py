"""What a process that was killed has uploaded already."""

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import crc64
from cairn.checkpoint.manifest import FileEntry, Manifest
from cairn.run.files import sync

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
        """Its content."""
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
        """Note that a part has arrived."""
        self.noted().parts[part] = etag, crc
        self._append({"part": part, "etag": etag, "crc64nvme": f"{crc:016x}"})

    def _append(self, row: dict[str, Any], *, at_once: bool = False) -> None:
        self._sent.append(json.dumps({"file": self._name, **row}), at_once=at_once)
