"""Files of one JSON object a line that grow while others read them."""

import json
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """One such file; each object is appended in one write."""

    def __init__(self, path: Path):
        self.path = path
        self._read = 0
        self._inode = 0

    def append(self, row: dict[str, Any]) -> None:
        """Add one object."""
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All objects; a last line that a crash cut short is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def new_rows(self) -> list[dict[str, Any]]:
        """The objects that were added since the last call."""
        try:
            with open(self.path, "rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:  # rows were dropped
                    self._inode, self._read = inode, 0
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        if not whole:
            return []
        self._read += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]
