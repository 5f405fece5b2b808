"""An index of a data file: where each record is, so that any can be read at any time.

It is made once for a file's content and kept in the cache. Each record that is read later is compared with
the CRC that the index has of it, so a file that is changed meanwhile is noticed.
"""

# Values of JSON have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import errno
import io
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cairn.run.records import cache
from cairn.run.records.kinds import UNREADABLE, BadRecord, is_compressed, open_plain
from cairn.run.records.splitting import CsvRows, read_json, read_row, split, with_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

FORMAT = 1
_ROW = struct.Struct("<QQIQ")
_FIELDS = [("start", "<u8"), ("line", "<u8"), ("size", "<u4"), ("crc", "<u8")]
_AT_ONCE = 1 << 20
"""Bytes of an index that are written together, and of a file that are read together at most."""
COLUMNS = 10_000
"""So many names of fields are noted at most."""


class _Out(Protocol):
    def write(self, data: bytearray, /) -> object: ...


class RecordFile:
    """A data file any record of which can be read at any time.

    columns: the names of the fields of its records, in the order in which they appear first.
    """

    def __init__(self, path: Path, kind: str, csv_numbers: Sequence[str] = ()):
        """Find its index, or make it.

        Args:
            kind: one of `cairn.run.records.kinds.TEXT`.
            csv_numbers: columns of a CSV file that are numbers.

        Raises:
            BadRecord: it can't be read, naming the line of the first record to blame; or the cache has no
                room for what a compressed file needs.
        """
        self.path, self.kind = path, kind
        self._numbers = frozenset(csv_numbers)
        try:
            content = cache.content_of(path)
            if content.startswith("0-"):
                raise BadRecord(f"{path}: the file is empty")
            name = cache.name_of([FORMAT, kind, path.suffix.lower() if is_compressed(path) else "", content])
            self._plain = self._copy(name) if is_compressed(path) else path
            self._file = os.open(self._plain, os.O_RDONLY)
            kept = _kept(name)
            if kept is None:
                kept = self._make(name)
                if cache.content_of(path) != content:
                    raise BadRecord(f"{path}: the file is being changed while it is read; try again")
        except UNREADABLE as error:
            raise BadRecord(f"{path}: can't be read: {_reason(error)}") from None
        self.rows, self.columns = kept
        if self.kind == "rows":
            with open(self._plain, "rb") as file:
                self._header = CsvRows(file, str(path))
            unknown = sorted(self._numbers - {*self._header.header})
            if unknown:
                columns = ", ".join(self._header.header)
                raise BadRecord(f"{path}: csv_numbers names {', '.join(unknown)}; its columns are {columns}")

    def __len__(self) -> int:
        return len(self.rows)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def read(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The records of these numbers.

        Raises:
            BadRecord: one is not what the index has of it, or a column that shall be a number is none.
        """
        for first, last in _runs(numbers, self.rows):
            low = int(self.rows[first]["start"])
            rows = self.rows[first : last + 1].tolist()
            try:
                data = os.pread(self._file, rows[-1][0] + rows[-1][2] - low, low)
            except OSError as error:
                raise BadRecord(f"{self.where(first)}: can't be read: {error.strerror}") from None
            for number, (start, line, size, crc) in enumerate(rows, start=first):
                raw = data[start - low : start - low + size]
                if cache.crc64(raw) != crc:
                    raise BadRecord(
                        f"{self.where(number)}: {self._plain} has changed since the run began to read it; "
                        "put the file back, or start the command again"
                    )
                yield self._record(raw, line)

    def where(self, number: int) -> str:
        """File and line of a record."""
        return f"{self.path}, line {self.rows[number]['line']}"

    def header(self) -> bytes:
        """What the records depend on beside their own bytes."""
        if self.kind != "rows":
            return b""
        return repr((self._header.header, sorted(self._numbers))).encode()

    def _record(self, raw: bytes, line: int) -> dict[str, Any]:
        if self.kind != "rows":
            return read_json(raw)
        record = read_row(raw, self._header, line)
        return with_numbers(record, self._numbers, f"{self.path}, line {line}") if self._numbers else record

    def _make(self, name: str) -> "tuple[NDArray[np.void], list[str]]":
        """The index, which is kept if the cache has room for it."""
        try:
            with cache.writing(f"{name}.index") as out:
                about = self._index_into(out)
            if cache.keep_note(name, about) and (kept := _kept(name)):
                return kept
        except cache.CacheError as error:
            logger.warning("%s: its index is made again at every start, since %s", self.path, error)
        memory = io.BytesIO()
        about = self._index_into(memory)
        return _rows_of(memory.getbuffer()), about["columns"]

    def _index_into(self, out: "_Out") -> dict[str, Any]:
        columns: dict[str, None] = {}
        buffer, crc, count = bytearray(), 0, 0
        with open(self._plain, "rb") as file:
            for piece in split(file, str(self.path), self.kind):
                if not columns.keys() >= piece.value.keys() and len(columns) < COLUMNS:
                    columns.update(dict.fromkeys(piece.value))
                buffer += _ROW.pack(piece.start, piece.line, len(piece.raw), cache.crc64(piece.raw))
                count += 1
                if len(buffer) > _AT_ONCE:
                    out.write(buffer)
                    crc, buffer = cache.crc64(buffer, crc), bytearray()
        out.write(buffer)
        if not count:
            raise BadRecord(f"{self.path}: it holds no records")
        return {"records": count, "columns": list(columns), "crc": f"{cache.crc64(buffer, crc):016x}"}

    def _copy(self, name: str) -> Path:
        """The decompressed copy of the file, which is made if the cache has none."""
        path = cache.folder() / f"{name}.plain"
        known = cache.read_note(f"{name}.plain")
        if known and path.is_file() and path.stat().st_size == known.get("size"):
            return path
        size = 0
        try:
            with open_plain(self.path) as file, cache.writing(path.name) as out:
                while data := file.read(_AT_ONCE):
                    out.write(data)
                    size += len(data)
        except cache.CacheError as error:
            raise BadRecord(
                f"{self.path}: there is no room for its decompressed copy in {error}; make room, or "
                "decompress the file"
            ) from None
        cache.keep_note(f"{name}.plain", {"size": size})
        return path


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        known = {errno.ENOENT: "there is no such file", errno.EISDIR: "it is a folder"}
        return known.get(error.errno) or str(error.strerror)
    return str(error) or type(error).__name__


def _kept(name: str) -> "tuple[NDArray[np.void], list[str]] | None":
    """The index that is kept under a name, unless it is damaged."""
    about: Mapping[str, Any] | None = cache.read_note(name)
    if about is None:
        return None
    try:
        with open(cache.folder() / f"{name}.index", "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if f"{cache.crc64(memoryview(data)):016x}" != about["crc"]:
            return None
        return _rows_of(data), list(about["columns"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rows_of(data: Any) -> "NDArray[np.void]":
    import numpy as np

    return np.frombuffer(data, np.dtype(_FIELDS))


def _runs(numbers: Sequence[int], rows: "NDArray[np.void]") -> Iterator[tuple[int, int]]:
    """The first and last of those numbers that follow each other and whose bytes are read together."""
    at = 0
    while at < len(numbers):
        first = last = numbers[at]
        at += 1
        if at < len(numbers) and numbers[at] == last + 1:
            low = int(rows[first]["start"])
            while (
                at < len(numbers)
                and numbers[at] == last + 1
                and int(rows[last + 1]["start"]) + int(rows[last + 1]["size"]) - low <= _AT_ONCE
            ):
                last += 1
                at += 1
        yield first, last
