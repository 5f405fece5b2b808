"""Records of a data set, any of which can be read at any time."""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cairn.run.records.index import RecordFile
from cairn.run.records.numbers import parse

# The package `datasets` is typed in part, and records not at all.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false


ROWS_AT_ONCE = 1000
"""Records that are read together where all are read; more would only take more memory."""
BLOCKS = 256
"""Digests of parts of a data set, which show how much of it has changed."""
JSON_TEXT = ("messages", "conversations")
"""Columns of tables whose text is the JSON of a list: what CSV, and many writers of Parquet, make of one."""

Record = dict[str, Any]


class Records(Protocol):
    """The records of a data set as they are trained on; a record's number is its place, from 0 on.

    columns: the names of the fields that any of them has.
    """

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """The records of these numbers.

        Raises:
            BadRecord: one can't be read, or has changed.
        """
        ...

    def where(self, number: int) -> str:
        """File and line of a record, or its number."""
        ...

    def select(self, numbers: Sequence[int]) -> "Records":
        """The records of these numbers as a data set."""
        ...

    def identity(self) -> dict[str, Any]:
        """What identifies the records in their order; see `cairn.run.records.collection`."""
        ...

    def key(self) -> str | None:
        """Names the records apart from others, at no cost; None if nothing does."""
        ...


def every(records: Records) -> Iterator[Record]:
    """All records in their order."""
    for start in range(0, len(records), ROWS_AT_ONCE):
        yield from records.read(range(start, min(start + ROWS_AT_ONCE, len(records))))


class FileRecords:
    """Those of files that Cairn reads itself, one file after the other."""

    def __init__(self, files: Sequence[RecordFile], numbers: Sequence[int] | None = None):
        """Of all the records, those of `numbers`; None: all of them."""
        self._files = files
        self._numbers = numbers
        self._ends = list(itertools.accumulate(len(file) for file in files))
        self.columns = list(dict.fromkeys(name for file in files for name in file.columns))

    def __len__(self) -> int:
        return self._ends[-1] if self._numbers is None else len(self._numbers)

    def read(self, numbers: Sequence[int]) -> list[Record]:
        found: list[Record] = []
        for file, own in self._by_file(numbers):
            found += (unpacked(one) for one in file.read(own)) if file.kind == "rows" else file.read(own)
        return found

    def where(self, number: int) -> str:
        ((file, (own,)),) = self._by_file([number])
        return file.where(own)

    def select(self, numbers: Sequence[int]) -> "FileRecords":
        own = self._numbers
        return FileRecords(self._files, numbers if own is None else [own[number] for number in numbers])

    def identity(self) -> dict[str, Any]:
        import numpy as np

        crcs = np.concatenate([file.rows["crc"] for file in self._files])
        if self._numbers is not None:
            crcs = crcs[np.asarray(self._numbers)]
        headers = b"".join(file.header() for file in self._files)
        blocks = np.array_split(crcs, min(BLOCKS, len(crcs)))
        return {
            "records": len(crcs),
            "content": hashlib.blake2b(headers + crcs.tobytes(), digest_size=16).hexdigest(),
            "blocks": [hashlib.blake2b(block.tobytes(), digest_size=6).hexdigest() for block in blocks],
        }

    def key(self) -> str:
        return str(self.identity()["content"])

    def _by_file(self, numbers: Sequence[int]) -> Iterator[tuple[RecordFile, list[int]]]:
        """The numbers in their order, as numbers in their files."""
        at: int | None = None
        own: list[int] = []
        for number in numbers:
            number = number if self._numbers is None else self._numbers[number]
            which = bisect.bisect_right(self._ends, number)
            if which != at and at is not None:
                yield self._files[at], own
                own = []
            at = which
            own.append(number - (self._ends[which - 1] if which else 0))
        if at is not None:
            yield self._files[at], own


class TableRecords:
    """Those of a data set of `datasets`.

    Args:
        table: a `datasets.Dataset`.
        name: what messages call it.
        which: what tells its records from others in the files that it lies in.
    """

    def __init__(self, table: Any, name: str, which: Sequence[str]):
        self._table, self._name, self._which = table, name, which
        self.columns = list(table.column_names)

    def __len__(self) -> int:
        return len(self._table)

    def read(self, numbers: Sequence[int]) -> list[Record]:
        columns = self._table[list(numbers)]
        rows = zip(*columns.values(), strict=True)
        return [of_table(dict(zip(columns, row, strict=True)), self._table.features) for row in rows]

    def where(self, number: int) -> str:
        return f"{self._name}, record {number} (counted from 0)"

    def select(self, numbers: Sequence[int]) -> "TableRecords":
        chosen = hashlib.blake2b(json.dumps(list(numbers)).encode(), digest_size=16).hexdigest()
        return TableRecords(self._table.select(numbers), self._name, [*self._which, chosen])

    def identity(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for columns in self._table.iter(ROWS_AT_ONCE):
            for row in zip(*columns.values(), strict=True):
                digest.update(to_bytes(dict(zip(columns, row, strict=True))))
        return {"records": len(self), "digest": digest.hexdigest()}

    def key(self) -> str | None:
        """The table's files, by size, time and inode: their folder is one for the content of the source."""
        files = [Path(file["filename"]) for file in self._table.cache_files]
        about = [[str(f), s.st_size, s.st_mtime_ns, s.st_ino] for f in files for s in (f.stat(),)]
        if not files:
            return None
        return json.dumps([self._which, len(self), self.columns, about])


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """What a digest of a record is of."""
    return json.dumps(record, sort_keys=True, default=str).encode()


def of_table(record: Mapping[str, Any], features: Any) -> Record:
    """A record of a table without the fields that others have, and with its conversation as a list."""
    return unpacked(as_written(record, features))


def as_written(value: Any, feature: Any) -> Any:
    """A value of a record without the fields that `datasets` has added to it.

    Its objects have all fields that any object of their column has; those that one lacks are None.

    Args:
        feature: the value's type in the data set; None if it is not known.
    """
    if isinstance(value, Mapping):
        if feature is not None and not isinstance(feature, Mapping):
            return value  # JSON, which stays as it is
        fields = feature or {}
        return {key: as_written(v, fields.get(key)) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [as_written(item, getattr(feature, "feature", None)) for item in value]
    return value


def unpacked(record: Record) -> Record:
    """The record with a conversation that is JSON text as the list that it is."""
    for name in JSON_TEXT:
        if isinstance(text := record.get(name), str):
            try:
                value = parse(text)
            except ValueError:
                continue  # the check of records says what it is
            if isinstance(value, list):
                record = {**record, name: value}
    return record


# What identifies data sets, and whether two of them hold the same records.


OF_RECORDS = ("records", "content", "digest", "stream", "stream_of")
"""What may stand in an identity. `content` is of the bytes of each record, `digest` of a table's values."""
STREAMS = {"stream", "stream_of"}


def identity_of(parts: Sequence[tuple[str, float, Mapping[str, Any]]]) -> dict[str, Any]:
    """What identifies several data sets: of each its label, its weight, and what identifies it."""
    return {"sets": [{"label": label, "weight": weight, **each} for label, weight, each in parts]}


def same_records(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are of the same records, as far as both say; also of several data sets."""
    pairs = _pairs(one, other)
    return pairs is not None and all(_same(*pair) for pair in pairs)


def mended(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are of equally many records of which most are the same, in their places.

    The digests of blocks of records show that: at most half of them may differ in each data set.
    """
    pairs = _pairs(one, other)
    return pairs is not None and all(_same(*pair) or _mostly(*pair) for pair in pairs)


def _pairs(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] | None:
    """The identities of single data sets that are to be compared; None if the data sets are others."""
    parts, others = one.get("sets"), other.get("sets")
    if parts is None and others is None:
        return [(one, other)]
    if parts is None or others is None or len(parts) != len(others):
        return None
    pairs = list(zip(parts, others, strict=True))
    return pairs if all((a["label"], a["weight"]) == (b["label"], b["weight"]) for a, b in pairs) else None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if bool(STREAMS & one.keys()) != bool(STREAMS & other.keys()):
        return False
    return all(one[key] == other[key] for key in OF_RECORDS if key in one and key in other)


def _mostly(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    blocks, others = one.get("blocks", []), other.get("blocks", [])
    if not blocks or one["records"] != other["records"] or len(blocks) != len(others):
        return False
    return 2 * sum(a != b for a, b in zip(blocks, others, strict=True)) <= len(blocks)
