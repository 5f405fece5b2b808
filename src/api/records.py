"""The records of a data set, as a run trains on them."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from cairn.run.data_sets import Records, every, load_records


@dataclass(frozen=True)
class _Source:
    name: str
    split: str
    csv_numbers: Sequence[str]
    split_setting: str = "split"
    part: None = None


class RecordSequence(Sequence[dict[str, Any]]):
    """The records of a data set in its order, each of which is read when it is asked for."""

    def __init__(self, records: Records):
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        numbers = range(len(self))[index]
        return self._records.read([numbers])[0] if isinstance(numbers, int) else self._records.read(numbers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return every(self._records)

    def where(self, index: int) -> str:
        """File and line of a record, or its number."""
        return self._records.where(index)


def read_records(
    path: str | os.PathLike[str], *, split: str = "train", csv_numbers: Sequence[str] = ()
) -> RecordSequence:
    """The records of a data set as a run trains on them: numbers as they are written, keys in their order.

    Args:
        path: a file, a folder, or a name on the hub, as `data.name`.
        split: as `data.split`.
        csv_numbers: as `data.csv_numbers`.

    Raises:
        cairn.CairnError: it can't be read; the message names file and line.
    """
    name = os.fspath(path)
    return RecordSequence(load_records(_Source(name, split, csv_numbers)))
