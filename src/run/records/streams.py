"""Records of a data set in its own order, of which never more is in memory than is read together."""

# The package `datasets` is typed in part, and records not at all.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cairn.run.records.collection import Record, of_table, unpacked
from cairn.run.records.kinds import UNREADABLE, BadRecord, kind_of_file, open_plain
from cairn.run.records.splitting import FilePosition, split, with_numbers


class RecordStream(Protocol):
    """A data set that is read from its beginning, or from where `state` was asked for.

    files: what is known of its files: the sizes of those that are here, the addresses of others. called: the
    name under which an identity has the digest of the stream.
    """

    files: Sequence[str]
    called: str

    def state(self) -> dict[str, Any]:
        """Where the next record begins, as JSON."""
        ...

    def seek(self, state: Mapping[str, Any] | None, before: int) -> None:
        """Go on where `state` was asked for; None: at the beginning.

        Args:
            before: how many records there are before that place.

        Raises:
            BadRecord: the state says no place in these files.
        """
        ...

    def next(self, count: int) -> list[tuple[str, Record]]:
        """As many records, or those that are left, each behind what messages call it.

        Raises:
            BadRecord: one is no record, or can't be read.
        """
        ...


class FileStream:
    """Files that Cairn reads itself, one after the other."""

    called = "stream_of"

    def __init__(self, paths: Sequence[Path], csv_numbers: Collection[str] = ()):
        self._paths = paths
        self._numbers = frozenset(csv_numbers)
        self.files: Sequence[str] = [str(path.stat().st_size) for path in paths]
        self._open: BinaryIO | None = None
        self.seek(None, 0)

    def state(self) -> dict[str, Any]:
        place = self._place
        return {"file": self._file, "place": None if place is None else list(place)}

    def seek(self, state: Mapping[str, Any] | None, before: int) -> None:
        self._file: int = state["file"] if state else 0
        self._place = FilePosition(*state["place"]) if state and state["place"] else None
        self._records: Iterator[tuple[str, Record]] | None = None

    def next(self, count: int) -> list[tuple[str, Record]]:
        found: list[tuple[str, Record]] = []
        while len(found) < count and self._file < len(self._paths):
            if self._records is None:
                self._records = self._of_file()
            found += itertools.islice(self._records, count - len(found))
            if len(found) < count:
                self._file, self._place, self._records = self._file + 1, None, None
        return found

    def _of_file(self) -> Iterator[tuple[str, Record]]:
        path = self._paths[self._file]
        kind = kind_of_file(path.name)
        assert kind is not None
        try:
            file = open_plain(path)
        except UNREADABLE as error:
            raise BadRecord(f"{path}: can't be read: {error}") from None
        with file:
            for piece in split(file, str(path), kind, self._place):
                self._place = piece.end
                where, record = f"{path}, line {piece.line}", piece.value
                if kind == "rows":
                    record = unpacked(with_numbers(record, self._numbers, where))
                yield where, record


class TableStream:
    """A data set of `datasets`.

    Args:
        stream: a `datasets.IterableDataset`.
        name: what messages call it.
    """

    called = "stream"

    def __init__(self, stream: Any, files: Sequence[str], name: str):
        self.files = files
        self._stream, self._name = stream, name
        self._beginning = stream.state_dict()
        self.seek(None, 0)

    def state(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def seek(self, state: Mapping[str, Any] | None, before: int) -> None:
        self._stream.load_state_dict(copy.deepcopy(dict(self._beginning if state is None else state)))
        self._records = iter(self._stream)
        self._number = before

    def next(self, count: int) -> list[tuple[str, Record]]:
        from datasets.exceptions import DatasetsError

        try:
            features = self._stream.features
            found = [of_table(record, features) for record in itertools.islice(self._records, count)]
        except (*UNREADABLE, ValueError, DatasetsError) as error:
            what = " ".join(str(error.__cause__ or error).split())
            raise BadRecord(f"{self._name}: can't be read any further: {what}") from None
        first, self._number = self._number, self._number + len(found)
        names = [f"{self._name}, record {n} (counted from 0)" for n in range(first, self._number)]
        return list(zip(names, found, strict=True))
