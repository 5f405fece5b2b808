"""What a process that was killed has uploaded already."""

import json
from pathlib import Path

from cairn.checkpoint.checksums import crc64
from cairn.checkpoint.manifest import FileEntry, Manifest


class Sent:
    """A local note of the files of a step that were sent, so that a later process need not send them again.

    It counts for one manifest only: the files of another attempt's step of the same number may have replaced
    those that an older note lists.

    Args:
        path: the file of the note; a line that was cut is ignored.
        manifest: the step's.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        title = f"{crc64(memoryview(manifest.to_json())):016x}"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        self._lines = set(lines) if lines[:1] == [title] else set[str]()
        if not self._lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{title}\n")

    def has(self, name: str, entry: FileEntry) -> bool:
        """Whether the file was sent with this content."""
        return _line(name, entry) in self._lines

    def add(self, name: str, entry: FileEntry) -> None:
        """Note that the file was sent."""
        with open(self.path, "a") as file:
            file.write(f"{_line(name, entry)}\n")

    def remove(self) -> None:
        """Remove the note, once the step is committed."""
        self.path.unlink(missing_ok=True)


def _line(name: str, entry: FileEntry) -> str:
    return json.dumps([name, entry.size, *entry.crc64nvme])
