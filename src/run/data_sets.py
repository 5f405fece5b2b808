# The package `datasets` is typed in part, and records not at all.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
"""Data sets: read from a file, a folder or the hub, and identified by their content.

JSON and CSV are read by Cairn itself (`cairn.run.records`); Parquet, what `save_to_disk` wrote and the hub by
`datasets`. This needs neither torch nor a tokenizer, so that the launcher can do it before anything starts.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cairn.run.records import tables
from cairn.run.records.checks import Check, content_digest, examine, examine_beginning, remembered
from cairn.run.records.collection import (
    ROWS_AT_ONCE,
    FileRecords,
    Record,
    Records,
    every,
    identity_of,
    mended,
    same_records,
)
from cairn.run.records.index import RecordFile
from cairn.run.records.kinds import COMPRESSIONS, KINDS, TEXT, UNREADABLE, BadRecord, kind_of_file, look_into
from cairn.run.records.splitting import kind_of
from cairn.run.records.streams import FileStream, RecordStream
from cairn.run.seeds import permutation

__all__ = [
    "ROWS_AT_ONCE",
    "UNREADABLE",
    "BadRecord",
    "Check",
    "DataSetPart",
    "DataSource",
    "Record",
    "RecordStream",
    "Records",
    "content_digest",
    "every",
    "examine",
    "examine_beginning",
    "identity_of",
    "kind_of",
    "load_records",
    "load_stream",
    "mended",
    "remembered",
    "same_records",
    "what_is_read",
]

_SPLIT = re.compile(r"([\w.-]+)(\[[^\]]*\])?")


class DataSetPart(NamedTuple):
    """One of two parts of a data set: the records that are held out, by a draw of their own, or the others.

    share: of the records that is held out; at least one is. held_out: whether these are the part.
    """

    share: float
    held_out: bool

    def of(self, count: int) -> list[int]:
        """Numbers of the part's records in their order, of a data set of `count`; the same in every run."""
        order = permutation(count, 0, "held out")
        first = max(1, round(self.share * count))
        return sorted(order[:first] if self.held_out else order[first:])


class DataSource(Protocol):
    """Where a data set is.

    name: a .jsonl, .json, .parquet or .csv file, a folder of such files or from `save_to_disk`, or a name on
    the hub. split: of it, or a slice such as train[:1000]. split_setting: what sets the split, as messages
    show it. part: of the split; None: all of it. csv_numbers: columns of CSV files that are no text.
    """

    @property
    def name(self) -> str: ...

    @property
    def part(self) -> DataSetPart | None: ...

    @property
    def split(self) -> str: ...

    @property
    def split_setting(self) -> str: ...

    @property
    def csv_numbers(self) -> Sequence[str]: ...


class _Files(NamedTuple):
    """The files of a data set, and the split that they are read as; `folder` says what is not read of it."""

    paths: Sequence[Path]
    split: str
    said: str | None

    @property
    def are_text(self) -> bool:
        return kind_of_file(self.paths[0].name) in TEXT


def load_records(source: DataSource) -> Records:
    """The data set: a file, a folder, one that `save_to_disk` wrote, or a name on the hub.

    Raises:
        BadRecord: it can't be read, naming file and line where one is to blame, or it holds no records.
    """
    files = _files_of(source)
    if files and files.are_text:
        opened = [RecordFile(path, str(kind_of_file(path.name)), source.csv_numbers) for path in files.paths]
        records: Records = FileRecords(opened)
        if files.split != "train":
            records = records.select(_numbers_of(source, files.split, len(records)))
    else:
        records = tables.load(source, files.paths if files else None, files.split if files else source.split)
    if source.part and len(records):
        records = _Part(records.select(source.part.of(len(records))), source.name, source.part)
    if not len(records):
        raise BadRecord(f"{source.name} holds no records")
    return records


def load_stream(source: DataSource) -> RecordStream:
    """The same as a stream, of which nothing but its beginning has been read.

    Raises:
        BadRecord: it can't be read.
    """
    files = _files_of(source)
    if files and files.are_text:
        return FileStream(files.paths, source.csv_numbers)
    return tables.stream(source, files.paths if files else None, files.split if files else source.split)


def what_is_read(source: DataSource) -> str | None:
    """Which files of a folder are read, and which are not, for the user; None if it is no folder of files.

    Raises:
        BadRecord: none is.
    """
    files = _files_of(source)
    return files.said if files else None


class _Part:
    """Records that are a part of a data set, which messages number within the part."""

    def __init__(self, records: Records, name: str, part: DataSetPart):
        self._records, self._name, self._part = records, name, part
        self.columns = records.columns

    def __len__(self) -> int:
        return len(self._records)

    def read(self, numbers: Sequence[int]) -> list[Record]:
        return self._records.read(numbers)

    def where(self, number: int) -> str:
        which = "held out" if self._part.held_out else "not held out"
        return f"{self._records.where(number)} ({which})"

    def select(self, numbers: Sequence[int]) -> Records:
        return _Part(self._records.select(numbers), self._name, self._part)

    def identity(self) -> dict[str, Any]:
        return self._records.identity()

    def key(self) -> str | None:
        return self._records.key()


def _files_of(source: DataSource) -> _Files | None:
    """The files of a data set that is a file or a folder; None if it is neither, or from `save_to_disk`.

    Raises:
        BadRecord: there is no such file, its kind is unknown, or it has no such split.
    """
    path = Path(source.name)
    if kind_of_file(source.name) and not path.is_dir():
        if not path.is_file():
            raise BadRecord(f"{path}: there is no such file")
        if not path.stat().st_size:
            raise BadRecord(f"{path}: the file is empty")
        if _base_of(source) != "train":
            raise BadRecord(
                f"{path}: a file has one split, train (or a part of it, such as train[:1000]); "
                f"{source.split_setting} is {source.split}"
            )
        return _Files([path], source.split, None)
    if path.is_file():
        raise BadRecord(
            f"{path}: a {path.suffix or 'nameless kind of'} file has no records that Cairn could tell; "
            f"it reads {', '.join(KINDS)}, also compressed ({', '.join(COMPRESSIONS)})"
        )
    if not path.is_dir() or tables.is_saved(path):
        return None
    base = _base_of(source)
    folder = look_into(path, base, source.split_setting)
    return _Files(folder.read, re.sub(rf"\b{re.escape(base)}\b", "train", source.split), folder.said)


def _base_of(source: DataSource) -> str:
    """The one split that the setting names, without slices.

    Raises:
        BadRecord: it names several, or is none.
    """
    parts = [_SPLIT.fullmatch(part.strip()) for part in source.split.split("+")]
    bases = {part[1] for part in parts if part}
    if None in parts or len(bases) != 1:
        raise BadRecord(
            f"{source.name}: {source.split_setting} is {source.split!r}; it must be a split, or parts of one "
            "such as train[:1000] or train[:10%]+train[90%:]"
        )
    return bases.pop()


def _numbers_of(source: DataSource, split: str, count: int) -> list[int]:
    """Numbers of the records in the parts of a split."""
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": count})
    except (ValueError, AssertionError) as error:
        raise BadRecord(f"{source.name}: {source.split_setting} is {source.split!r}: {error}") from None
    return [number for part in parts for number in range(part.from_ or 0, part.to)]
