"""Where the records of a file begin and end, and what each holds; errors name file and line."""

# Values of JSON have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

from cairn.run.records.kinds import UNREADABLE, BadRecord
from cairn.run.records.numbers import float_as_written, int_as_written, parse, parse_again, parse_at

RECORD_BYTES = 1 << 30
"""A record may not be larger: it is held in memory as a whole."""
WINDOW = 1 << 22
"""Characters of a file of values that are looked at together."""
_WHITE = b" \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_UTF8_MARK = codecs.BOM_UTF8


class FilePosition(NamedTuple):
    """Where in a file to look for the next record: behind so many bytes, in this line, counted from 1."""

    byte: int = 0
    line: int = 1


class RawRecord(NamedTuple):
    """A record: its first byte, its bytes, the line that it begins in, and what it holds."""

    start: int
    raw: bytes
    line: int
    value: dict[str, Any]

    @property
    def end(self) -> FilePosition:
        """Where to look for the next one."""
        return FilePosition(self.start + len(self.raw), self.line + self.raw.count(b"\n"))


def split(file: BinaryIO, name: str, kind: str, place: FilePosition | None = None) -> Iterator[RawRecord]:
    """The records of a file from a place on, each of which is checked.

    Args:
        file: its bytes, decompressed.
        name: what messages call it.
        kind: lines: JSON, one object a line. values: JSON, one list of objects, or objects one after the
            other. rows: CSV with a header, whose values are texts; an empty one is None.
        place: the `end` of one of its records; None: the beginning.

    Raises:
        BadRecord: naming the line, of the first that is no record, or is not read without a loss; or the file
            can't be read.
    """
    try:
        beginning = file.read(4)
        if beginning[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in beginning:
            raise BadRecord(f"{name}, line 1: it is not UTF-8 but UTF-16 or UTF-32; save the file as UTF-8")
        first = FilePosition(len(_UTF8_MARK) if beginning.startswith(_UTF8_MARK) else 0)
        yield from _SPLITTERS[kind](file, name, first, place or first)
    except UNREADABLE as error:
        raise BadRecord(f"{name}: can't be read: {error}") from None


def _lines(file: BinaryIO, name: str, first: FilePosition, place: FilePosition) -> Iterator[RawRecord]:
    byte, number = place
    file.seek(byte)
    if byte > first.byte:  # the rest of a line
        rest = file.readline(RECORD_BYTES)
        byte, number = byte + len(rest), number + 1
    while line := file.readline(RECORD_BYTES + 1):
        raw = line.strip(_WHITE)
        if raw:
            if len(line) > RECORD_BYTES:
                _too_large(name, number)
            before = len(line) - len(line.lstrip(_WHITE))
            yield RawRecord(byte + before, raw, number, _object(raw, name, number, before))
        byte, number = byte + len(line), number + 1


def _object(raw: bytes, name: str, number: int, before: int) -> dict[str, Any]:
    """The object of a line; `before`: bytes of the line before it."""
    try:
        value = parse(raw.decode())
    except UnicodeDecodeError as error:
        _no_utf8(f"{name}, line {number}", error.object[error.start], error.start + before)
    except json.JSONDecodeError as error:
        raise BadRecord(
            f"{name}, line {number}: it is no JSON: {error.msg} (column {error.colno + before})"
        ) from None
    except ValueError as error:
        raise BadRecord(f"{name}, line {number}: {error}") from None
    return _checked(value, name, number)


def _checked(value: Any, name: str, line: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRecord(
            f"{name}, line {line}: it is {kind_of(value)} and no record, which is an object in braces"
        )
    return value


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return f"the number {value}"
    return "missing" if value is None else f"a {type(value).__name__}"


def _no_utf8(where: str, byte: int, at: int) -> NoReturn:
    raise BadRecord(f"{where}: byte {byte:#04x} at {at} is not UTF-8; save the file as UTF-8") from None


def _too_large(name: str, line: int) -> NoReturn:
    raise BadRecord(
        f"{name}, line {line}: the record that begins here is larger than {RECORD_BYTES >> 30} GiB"
    )


# JSON that is no lines


class _Window:
    """The text of a file from a place on, of which so much is in memory as is looked at together."""

    def __init__(self, file: BinaryIO, name: str, place: FilePosition):
        self.name = name
        self.text, self.at = "", 0
        self.byte, self.line = place
        """Of the character `at`."""
        self.ended = False
        self._line_byte = place.byte
        """Of the first byte of that line, as far as is known."""
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        file.seek(place.byte)

    def more(self) -> None:
        """Read on, as much again as is there."""
        self.text, self.at = self.text[self.at :], 0
        if len(self.text) > RECORD_BYTES:
            _too_large(self.name, self.line)
        data = self._file.read(max(WINDOW, len(self.text)))
        self.ended = not data
        try:
            self.text += self._decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            line, at = self._place(self.text.encode() + error.object[: error.start])
            _no_utf8(f"{self.name}, line {line}", error.object[error.start], at)

    def peek(self) -> str:
        """The next character that is no space, "" at the end of the file."""
        while True:
            found = _SPACES.match(self.text, self.at)
            assert found is not None
            self.skip(found.end())
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def skip(self, to: int) -> bytes:
        """Go on to a place of the text, and return the bytes that are skipped."""
        skipped = self.text[self.at : to].encode()
        line, at = self._place(skipped)
        self.at = to
        self.byte += len(skipped)
        self.line, self._line_byte = line, self.byte - at
        return skipped

    def _place(self, skipped: bytes) -> tuple[int, int]:
        """The line behind so many bytes more, and the bytes of it before that."""
        if newlines := skipped.count(b"\n"):
            return self.line + newlines, len(skipped) - skipped.rfind(b"\n") - 1
        return self.line, self.byte + len(skipped) - self._line_byte

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        """Refuse what is at a place of the text."""
        line, before = self._place(self.text[self.at : at].encode() if at is not None else b"")
        raise BadRecord(f"{self.name}, line {line}: it is no JSON: {problem} (column {before + 1})")

    def value(self) -> RawRecord:
        """The object that begins here."""
        while True:
            try:
                value, end = parse_at(self.text, self.at)
                break
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16
                if self.ended or not cut:
                    self.fail(error.msg, error.pos)
                self.more()
            except ValueError as error:
                raise BadRecord(f"{self.name}, line {self.line}: {error}") from None
        record = _checked(value, self.name, self.line)
        start, line = self.byte, self.line
        return RawRecord(start, self.skip(end), line, record)


def _values(file: BinaryIO, name: str, first: FilePosition, place: FilePosition) -> Iterator[RawRecord]:
    beginning = _Window(file, name, first)
    in_list = beginning.peek() == "["
    if not in_list:
        window = _Window(file, name, place)
        while window.peek():
            yield window.value()
        return
    if place == first:
        window = beginning
        window.skip(window.at + 1)
        if window.peek() != "]":
            yield window.value()
    else:
        window = _Window(file, name, place)
    while window.peek() == ",":
        window.skip(window.at + 1)
        window.peek()
        yield window.value()
    if window.peek() != "]":
        window.fail("Expecting ',' delimiter" if window.peek() else "the list does not end")
    window.skip(window.at + 1)
    if window.peek():
        window.fail("Extra data behind the list")


# CSV


class CsvRows:
    """How the rows of a CSV file are read.

    header: the names of its columns. place: behind the header.
    """

    def __init__(self, file: BinaryIO, name: str):
        """Read the header.

        Raises:
            BadRecord: there is none, or two columns have the same name.
        """
        beginning = len(_UTF8_MARK) if file.read(3) == _UTF8_MARK else 0
        reader = _RowReader(file, name, FilePosition(beginning))
        found = next(reader.rows(), None)
        if found is None:
            raise BadRecord(f"{name}: it holds no records")
        self.name, self.header = name, found[3]
        self.place = reader.place
        for i, column in enumerate(self.header):
            if not column or column in self.header[:i]:
                what = f"two columns are named {column!r}" if column else f"column {i + 1} has no name"
                raise BadRecord(f"{name}, line 1: {what}; the first line names the columns")

    def record(self, row: Sequence[str], line: int) -> dict[str, str | None]:
        """A row by its columns.

        Raises:
            BadRecord: it has more or fewer of them.
        """
        if len(row) != len(self.header):
            raise BadRecord(
                f"{self.name}, line {line}: it has {len(row)} fields, and the header names "
                f"{len(self.header)} columns"
            )
        return dict(zip(self.header, [field or None for field in row], strict=True))


class _RowReader:
    """Rows of a file, and the place behind the last."""

    def __init__(self, file: BinaryIO, name: str, place: FilePosition):
        self.place = place
        self._file, self._name = file, name
        self._raw = bytearray()
        file.seek(place.byte)

    def rows(self) -> Iterator[tuple[int, bytes, int, list[str]]]:
        """First byte, bytes, line and fields of each row that is not blank."""
        csv.field_size_limit(RECORD_BYTES)
        reader = csv.reader(self._texts(), strict=True)
        while True:
            start = self.place
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise BadRecord(f"{self._name}, line {start.line}: it is no CSV: {error}") from None
            raw, self._raw = bytes(self._raw), bytearray()
            self.place = FilePosition(start.byte + len(raw), start.line + raw.count(b"\n"))
            if row is None:
                return
            if row and raw.strip(_WHITE):
                yield start.byte, raw, start.line, row

    def _texts(self) -> Iterator[str]:
        while line := self._file.readline(RECORD_BYTES):
            number = self.place.line + self._raw.count(b"\n")
            self._raw += line
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                _no_utf8(f"{self._name}, line {number}", error.object[error.start], error.start)


def _rows(file: BinaryIO, name: str, first: FilePosition, place: FilePosition) -> Iterator[RawRecord]:
    file.seek(0)
    rows = CsvRows(file, name)
    reader = _RowReader(file, name, rows.place if place == first else place)
    for start, raw, line, row in reader.rows():
        yield RawRecord(start, raw, line, rows.record(row, line))


_SPLITTERS: dict[str, Callable[[BinaryIO, str, FilePosition, FilePosition], Iterator[RawRecord]]] = {
    "lines": _lines,
    "values": _values,
    "rows": _rows,
}


# Records that were found, read again


def read_json(raw: bytes) -> dict[str, Any]:
    """The record of bytes that `split` has found no fault with."""
    return parse_again(raw.decode())


def read_row(raw: bytes, rows: CsvRows, line: int) -> dict[str, Any]:
    """The record of a row's bytes."""
    (row,) = csv.reader(io.StringIO(raw.decode(), newline=""), strict=True)
    return rows.record(row, line)


def with_numbers(record: dict[str, Any], numbers: Collection[str], where: str) -> dict[str, Any]:
    """A record of CSV in which these columns are numbers, or true and false.

    Raises:
        BadRecord: one is neither.
    """
    return {
        name: _number(value, name, where) if name in numbers and value is not None else value
        for name, value in record.items()
    }


def _number(text: str, name: str, where: str) -> float:
    bare = text.strip()
    if bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        return int_as_written(bare) if _INTEGER.fullmatch(bare) else float_as_written(bare)
    except ValueError:
        raise BadRecord(
            f"{where}: {name} is {text!r} and no number, nor true or false; csv_numbers lists this column"
        ) from None
