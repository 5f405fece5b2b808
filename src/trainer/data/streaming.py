# The package `datasets` is typed in part.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false
"""Data sets that are read in their own order, and never as a whole."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cairn.config.data import DataSetConfig, RecordsConfig
from cairn.run.data_sets import (
    UNREADABLE,
    BadRecord,
    as_written,
    examine_beginning,
    load_stream,
    locate,
)
from cairn.run.seeds import permutation
from cairn.trainer.data.sources import SFT, Record, Use

CHECKED = 1000
"""Records at the beginning of a stream that are checked, and by which it is known again."""


class Stream:
    """A data set that is read in its own order, block by block.

    The records of a block are shuffled among each other by the seed and the block's place, so that a resumed
    run needs no more than where the block began, reads it once more, and has the same order.
    A record's number counts all records that were taken before it.
    """

    repeats = False

    def __init__(
        self, config: DataSetConfig, settings: RecordsConfig, seed: int, *whose: str, use: Use = SFT
    ):
        """Open it; `whose` tells its orders from those of other data sets.

        Raises:
            BadRecord: it can't be read.
        """
        self.config = config
        self.use = use
        self._stream, self._files = load_stream(config)
        self._beginning = self._stream.state_dict()
        self._size = settings.shuffle_block
        self._shuffled = settings.shuffle
        self._seed, self._whose = seed, whose
        self._beginning_of_it: list[Record] | None = None
        """Its first records, once they were asked for."""
        self._seen: dict[int, tuple[int, Record]] = {}
        """By number, the records taken last, and the place of each in the data set."""
        self.seek(0, None)

    def seek(self, taken: int, state: Mapping[str, Any] | None) -> None:
        """Go on behind the first `taken` records; without a state, all of these are read once more."""
        self._taken = taken if state else 0
        self._epoch = state["epoch"] if state else 0
        self._first = state["first"] if state else 0
        """Of the epoch, the records before the block."""
        self._at = state["at"] if state else self._beginning
        """The state of the library where the block begins."""
        self._offset = state["offset"] if state else 0
        """Records of the block that were taken."""
        self._rewind(self._at)
        self._block: list[tuple[int, Record]] = []
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

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """The records of these numbers, which were taken last."""
        return [self._seen[number][1] for number in numbers]

    def first(self, count: int) -> list[int]:
        """Numbers of the first records in the data set; they count as taken last."""
        self._seen = dict(enumerate(enumerate(self._read_first()[:count])))
        return list(self._seen)

    def where(self, number: int) -> str:
        """The place in the data set, if the record is one of those taken last."""
        place = self._seen[number][0] if number in self._seen else number
        return locate(self.config, place)

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
        return examine_beginning(self.config, self._files, self._read_first(), self.use.problem_of)

    def _read_first(self) -> list[Record]:
        if self._beginning_of_it is None:
            stream, _ = load_stream(self.config)
            self._beginning_of_it = self._read_on(iter(stream), CHECKED)
        return self._beginning_of_it

    def _rewind(self, at: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(copy.deepcopy(dict(at)))
        self._records = iter(self._stream)
        self._next = at
        """The library's state behind the block."""

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
        self._rewind(self._at)
        self._fill(self._size)

    def _fill(self, size: int) -> None:
        """Read the block that begins here, and shuffle it."""
        records = self._read_on(self._records, size)
        self._next = self._stream.state_dict()
        block = list(enumerate(records, start=self._first))
        if self._shuffled:
            purpose = (*self._whose, self._epoch, "block", self._first)
            order = permutation(len(block), self._seed, self.use.order, *purpose)
            block = [block[place] for place in order]
        self._block = block

    def _read_on(self, records: Iterator[Record], count: int) -> list[Record]:
        from datasets.exceptions import DatasetsError

        try:
            features = self._stream.features
            return [as_written(record, features) for record in itertools.islice(records, count)]
        except (*UNREADABLE, ValueError, DatasetsError) as error:
            what = " ".join(str(error.__cause__ or error).split())
            raise BadRecord(f"{self.config.name}: can't be read any further: {what}") from None
