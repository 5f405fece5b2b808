"""Where records come from: a data set in a seeded order, or read in its own order and never as a whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cairn.config.data import DataSetConfig, RecordsConfig
from cairn.run.data_sets import (
    BadRecord,
    Check,
    Record,
    Records,
    examine,
    examine_beginning,
    load_records,
    load_stream,
)
from cairn.run.seeds import permutation
from cairn.trainer.data.records import problem_of


@dataclass(frozen=True)
class Use:
    """What records are read for.

    order: what their orders are drawn for, as seeds have it. problem_of: why a record can't be learned from.
    units: how many units of learning each record of a data set is. facts: what is noted of a data set in its
    identity; raises BadRecord if its records don't go together. problem_of_all: why data sets of such
    identities can't be learned from, although each of their records could be.
    """

    order: str
    problem_of: Check
    units: Callable[[Records], int] = lambda data_set: 1
    facts: Callable[[DataSetConfig, Records], Mapping[str, Any]] = lambda config, data_set: {}
    problem_of_all: Callable[[Sequence[Mapping[str, Any]]], str | None] = lambda identities: None
    drops: bool = True
    """Whether records may be left out that nothing can be learned from (`data.unreadable = "drop"`)."""

    def reading(self, settings: RecordsConfig) -> "Use":
        """The same, which takes every record if those that can't be used are left out when they are met."""
        return replace(self, problem_of=takes_all) if self.drops and settings.unreadable == "drop" else self


def takes_all(record: Mapping[str, Any]) -> str | None:
    """No record has a problem."""
    return None


SFT = Use("sft order", problem_of)


class RecordSource(Protocol):
    """A data set's records in the order of training, epoch after epoch, each epoch in an order of its own."""

    config: DataSetConfig
    repeats: bool
    """Whether a record has the same number in every epoch."""

    def seek(self, taken: int, state: Mapping[str, Any] | None) -> None:
        """Go on behind the first `taken` records; `state`: what `state` said then, which saves time."""
        ...

    def take(self, count: int) -> list[int]:
        """Numbers of the next records.

        Raises:
            BadRecord: the data set can't be read any further.
        """
        ...

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """The records of these numbers, all of which `take` or `first` has returned last."""
        ...

    def first(self, count: int) -> list[int]:
        """Numbers of the records that a fresh run begins with."""
        ...

    def where(self, number: int) -> str:
        """Names a record, for messages."""
        ...

    def epoch(self, taken: int) -> float:
        """How many epochs the first `taken` records are."""
        ...

    def state(self) -> dict[str, Any] | None:
        """What to go on from; None if the number of records taken says all."""
        ...

    def identity(self) -> dict[str, Any]:
        """What identifies the data set, once its records are checked; see `cairn.run.data_sets`.

        Raises:
            BadRecord: naming the first record that can't be trained on.
        """
        ...


class Indexed:
    """A data set any record of which can be read at any time. A record's number is its place in it.

    Where each record is several units of learning, its place is counted in these: they are taken at different
    times, and each is read as the whole record.
    """

    repeats = True

    def __init__(
        self, config: DataSetConfig, settings: RecordsConfig, seed: int, *whose: str, use: Use = SFT
    ):
        """Open it; `whose`: part of the seed of its orders, different for each data set.

        Raises:
            BadRecord: it can't be read.
        """
        self.config = config
        self.records = load_records(config)
        self.use = use
        self.units = use.units(self.records)
        self._shuffled = settings.shuffle
        self._seed, self._whose = seed, whose
        self._taken = 0
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return self.units * len(self.records)

    def seek(self, taken: int, state: Mapping[str, Any] | None) -> None:
        """Go on behind the first `taken` records."""
        self._taken = taken

    def take(self, count: int) -> list[int]:
        """Numbers of the next records."""
        self._taken += count
        return [self._number(place) for place in range(self._taken - count, self._taken)]

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """The records of these numbers."""
        return list(self.records.read([number // self.units for number in numbers]))

    def first(self, count: int) -> list[int]:
        return [self._number(place) for place in range(min(count, len(self)))]

    def where(self, number: int) -> str:
        """File and line, or the number."""
        return self.records.where(number // self.units)

    def epoch(self, taken: int) -> float:
        return taken / len(self)

    def state(self) -> None:
        """Nothing but the number of records taken is needed."""

    def identity(self) -> dict[str, Any]:
        """What identifies the data set: all of its records."""
        found = examine(self.config, self.records, self.use.problem_of)
        return {**found, "records": len(self), **self.use.facts(self.config, self.records)}

    def _number(self, place: int) -> int:
        epoch, place = divmod(place, len(self))
        if not self._shuffled:
            return place
        if epoch != self._epoch:
            self._order = permutation(len(self), self._seed, self.use.order, *self._whose, epoch)
            self._epoch = epoch
        return self._order[place]


# Data sets that are read in their own order, and never as a whole.


CHECKED = 1000
"""Records at the beginning of a stream that are checked, and by which it is known again."""


class StreamSource:
    """A data set that is read in its own order, block by block.

    The records of a block are shuffled among each other by the seed and the block's place, so that a resumed
    run needs no more than where the block began, reads it once more, and has the same order.
    A record's number counts all records that were taken before it.
    """

    repeats = False

    def __init__(
        self, config: DataSetConfig, settings: RecordsConfig, seed: int, *whose: str, use: Use = SFT
    ):
        """Open it; `whose`: part of the seed of its orders, different for each data set.

        Raises:
            BadRecord: it can't be read.
        """
        self.config = config
        self.use = use
        self._stream = load_stream(config)
        self._beginning = self._stream.state()
        self._size = settings.shuffle_block
        self._shuffled = settings.shuffle
        self._seed, self._whose = seed, whose
        self._beginning_of_it: list[tuple[str, Record]] | None = None
        """Its first records and their names, once they were asked for."""
        self._seen: dict[int, tuple[str, Record]] = {}
        """By number, the records taken last, each behind its name."""
        self.seek(0, None)

    def seek(self, taken: int, state: Mapping[str, Any] | None) -> None:
        """Go on behind the first `taken` records; without a state, all of these are read once more."""
        self._taken = taken if state else 0
        self._epoch = state["epoch"] if state else 0
        self._first = state["first"] if state else 0
        """Of the epoch, the records before the block."""
        self._at = state["at"] if state else self._beginning
        """The state of the stream where the block begins."""
        self._offset = state["offset"] if state else 0
        """Records of the block that were taken."""
        self._rewind(self._at, self._first)
        self._block: list[tuple[str, Record]] = []
        if self._offset:
            assert state is not None
            self._fill(state["size"])
            if len(self._block) < state["size"]:
                raise BadRecord(f"{self.config.name} holds fewer records than when the checkpoint was saved")
        if not state:
            while self._taken < taken:
                self.take(min(taken - self._taken, self._size))
        self._seen = {}

    def take(self, count: int) -> list[int]:
        """Numbers of the next records."""
        self._seen = {}
        while len(self._seen) < count:
            if self._offset == len(self._block):
                self._advance()
            self._seen[self._taken] = self._block[self._offset]
            self._offset += 1
            self._taken += 1
        return list(self._seen)

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """The records of these numbers, which were taken last."""
        return [self._seen[number][1] for number in numbers]

    def first(self, count: int) -> list[int]:
        """Numbers of the first records in the data set; they count as taken last."""
        self._seen = dict(enumerate(self._read_first()[:count]))
        return list(self._seen)

    def where(self, number: int) -> str:
        """File and line, or the number in the data set, if the record is one of those taken last."""
        if number in self._seen:
            return self._seen[number][0]
        return f"{self.config.name}, record {number} (counted from 0) of those that were taken"

    def epoch(self, taken: int) -> float:
        """How many epochs have ended."""
        return self._epoch

    def state(self) -> dict[str, Any]:
        """Where the block begins, and how much of it was taken."""
        size = max(len(self._block), 1)
        return {
            "epoch": self._epoch,
            "first": self._first,
            "at": self._at,
            "offset": self._offset,
            "size": size,
        }

    def identity(self) -> dict[str, Any]:
        """What identifies the data set: its first records, and its files."""
        first, stream = self._read_first(), self._stream
        return examine_beginning(self.config, stream.files, first, self.use.problem_of, stream.called)

    def _read_first(self) -> list[tuple[str, Record]]:
        if self._beginning_of_it is None:
            self._beginning_of_it = load_stream(self.config).next(CHECKED)
        return self._beginning_of_it

    def _rewind(self, at: Mapping[str, Any], before: int) -> None:
        self._stream.seek(at, before)
        self._next = self._stream.state()
        """The stream's state behind the block."""

    def _advance(self) -> None:
        """Go to the next block, which may be the first of the next epoch."""
        self._first += len(self._block)
        self._at, self._offset = self._next, 0
        self._fill(self._size)
        if self._block:
            return
        if not self._first:
            raise BadRecord(f"{self.config.name} holds no records")
        self._epoch, self._first, self._at = self._epoch + 1, 0, self._beginning
        self._rewind(self._at, 0)
        self._fill(self._size)

    def _fill(self, size: int) -> None:
        """Read the block that begins here, and shuffle it."""
        block = self._stream.next(size)
        self._next = self._stream.state()
        if self._shuffled:
            purpose = (*self._whose, self._epoch, "block", self._first)
            order = permutation(len(block), self._seed, self.use.order, *purpose)
            block = [block[place] for place in order]
        self._block = block
