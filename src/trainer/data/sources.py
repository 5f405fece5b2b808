"""Where records come from: a data set in a seeded order of its own, and the place that it has come to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cairn.config.data import DataSetConfig, RecordsConfig
from cairn.run.data_sets import Check, Records, examine, load_records
from cairn.run.seeds import permutation
from cairn.trainer.data.records import problem_of

Record = Mapping[str, Any]


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


def takes_all(record: Record) -> str | None:
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

    def read(self, numbers: Sequence[int]) -> list[Record]:
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
        """Open it; `whose` tells its orders from those of other data sets.

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

    def read(self, numbers: Sequence[int]) -> list[Record]:
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
