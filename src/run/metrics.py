"""`metrics.jsonl`: one row per optimiser step, each step once."""

import json
import os
from pathlib import Path
from typing import Any

from cairn.run.files import write_atomic


class MetricsLog:
    """The metrics of a run, one JSON object a line, in the order of steps."""

    def __init__(self, path: Path):
        self.path = path
        self._read = 0
        self._inode = 0

    def append(self, row: dict[str, Any]) -> None:
        """Add one step's row; it must hold the key `step`."""
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that a crash cut short is left out."""
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
        """The rows that were added since the last call."""
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

    def keep_through(self, step: int) -> None:
        """Drop the rows after `step`: the run goes on from there and writes them again."""
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
            write_atomic(self.path, "".join(kept).encode())
