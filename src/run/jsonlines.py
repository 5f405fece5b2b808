"""Files of one JSON object a line that grow while others read them.

A crash, a full disk or a power cut may leave a line torn, and a bad disk worse. Readers skip damaged lines;
`drop` takes them out of the file, and keeps them beside it.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from cairn.run.files import DamagedFile, free_name, naming, sync, write_atomic

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class JsonLines:
    """One such file; each object is appended in one write."""

    def __init__(self, path: Path):
        self.path = path
        self._read = 0
        self._inode = 0
        self._reread = False
        self._current: list[Row] = []

    def is_row(self, value: Any) -> bool:
        """Whether `value`, the content of a line, is one of this file's objects."""
        return isinstance(value, dict)

    def append(self, row: Row) -> None:
        """Add one object, on a line of its own even if the last one was cut short."""
        line = (json.dumps(row) + "\n").encode()
        with naming(self.path), open(self.path, "ab+") as file:
            if file.tell() and _last_byte(file.fileno()) != b"\n":
                line = b"\n" + line
            file.write(line)

    def make_durable(self) -> None:
        """Return when what has been appended survives a power cut."""
        with naming(self.path), contextlib.suppress(FileNotFoundError):
            sync(self.path)

    def rows(self) -> list[Row]:
        """All objects.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        rows = map(self._parse, self._content().split(b"\n"))
        return [row for row in rows if row is not None]

    def lines(self, content: bytes | None = None) -> list[tuple[bytes, Row]]:
        """All objects, each with its line, of the file, or of another one of which `content` is the content.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        lines = (self._content() if content is None else content).split(b"\n")
        return [(line, row) for line in lines if (row := self._parse(line)) is not None]

    def numbered(self) -> list[tuple[int, str, Row | None]]:
        """Number, text and object (or None) of each line; a last one that was cut short is left out.

        For whoever judges the file itself; everybody else skips damaged lines.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        lines = self._content().split(b"\n")
        found = [
            (number, line.decode(errors="replace"), self._parse(line))
            for number, line in enumerate(lines, start=1)
        ]
        return found if found[-1][2] is not None else found[:-1]

    def current(self) -> list[Row]:
        """All objects whose lines have ended; reads only what was added since the last call.

        Don't mix with `new_rows` on the same instance. The list is this instance's own and grows.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        added = self.new_rows()
        if self._reread:
            self._current = []
        self._current += added
        return self._current

    def new_rows(self) -> list[Row]:
        """The objects that were added since the last call, as far as their lines have ended.

        All of them if the file has been replaced, as `drop` does.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        whole = self._new_content().rpartition(b"\n")[0]
        if not whole:
            return []
        self._read += len(whole) + 1
        rows = map(self._parse, whole.split(b"\n"))
        return [row for row in rows if row is not None]

    def drop(self, wanted: Callable[[Row], bool] = lambda row: True) -> int:
        """Drop the objects that are not `wanted`, and move damaged lines to `NAME.damaged-N` beside the file.

        Nobody else may write to the file meanwhile. It is durable when this returns, and left alone if there
        is nothing to drop. Returns how many objects were dropped.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        kept: list[bytes] = []
        damaged: list[bytes] = []
        dropped = 0
        for line in self._content().split(b"\n"):
            row = self._parse(line)
            if row is None:
                damaged += [line] if line.strip() else []
            elif wanted(row):
                kept.append(line)
            else:
                dropped += 1
        if damaged:
            aside = free_name(self.path)
            write_atomic(aside, b"".join(line + b"\n" for line in damaged), durable=True)
            lines = "1 damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
            logger.warning("%s: took out %s, now in %s", self.path, lines, aside.name)
        if damaged or dropped:
            write_atomic(self.path, b"".join(line + b"\n" for line in kept), durable=True)
        return dropped

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise DamagedFile(f"{self.path}: can't be read: {error.strerror}") from None

    def _new_content(self) -> bytes:
        """The bytes after those that were read before; `_reread` says whether that is the whole file."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                self._reread = status.st_ino != self._inode or status.st_size < self._read
                if self._reread:
                    self._inode, self._read = status.st_ino, 0
                file.seek(self._read)
                return file.read()
        except FileNotFoundError:
            self._reread, self._inode, self._read = True, 0, 0
            return b""
        except OSError as error:
            raise DamagedFile(f"{self.path}: can't be read: {error.strerror}") from None

    def _parse(self, line: bytes) -> Row | None:
        """The object in a line; None if there is none."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return value if self.is_row(value) else None


def as_object(value: Any) -> Row:
    """A JSON value as an object; an empty one if it is something else."""
    return cast(Row, value) if isinstance(value, dict) else {}


def _last_byte(fd: int) -> bytes:
    return os.pread(fd, 1, os.fstat(fd).st_size - 1)
