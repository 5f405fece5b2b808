"""The records of all data sets of a run in the order of training."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cairn.config.data import RecordsConfig
from cairn.run.mixture import Mixture
from cairn.trainer.data.opening import open_sources, weights_of
from cairn.trainer.data.sources import Use

Taken = tuple[str, int]
"""A record that was taken: the label of its data set, and its number there."""


class RecordOrder:
    """An endless stream of epochs, each in its own seeded order.

    Of several data sets, each record's is drawn by weight, from the seed and the record's place alone; each
    data set has epochs and orders of its own. `position` counts the records taken so far, of all data sets
    together, and `state` says what else saves time when a resumed run goes on from there.
    """

    def __init__(
        self,
        settings: RecordsConfig,
        use: Use,
        seed: int,
        position: int,
        state: Mapping[str, Any] | None = None,
    ):
        """Open the data sets, and go on behind the first `position` records.

        Args:
            state: of the data sets there, as `state` returned it.

        Raises:
            BadRecord: a data set can't be read.
        """
        self.settings = settings
        self.position = position
        self.sources = open_sources(settings, seed, use)
        self.labels = list(self.sources)
        self._mixture = Mixture(seed, "data set of record", weights_of(settings))
        for label, source in self.sources.items():
            source.seek(self.taken_of(label), (state or {}).get(label))

    def taken_of(self, label: str) -> int:
        """How many records of a data set were taken so far."""
        return self._mixture.before(self.position, self.labels.index(label))

    def state(self) -> dict[str, Any]:
        """By label, what the data sets go on from that need more than the number of records taken."""
        states = {label: source.state() for label, source in self.sources.items()}
        return {label: state for label, state in states.items() if state is not None}

    def take(self, count: int) -> list[Taken]:
        """The next records."""
        places = range(self.position, self.position + count)
        labels = [self.labels[self._mixture.at(place)] for place in places]
        self.position += count
        own = {label: iter(self.sources[label].take(n)) for label, n in Counter(labels).items()}
        return [(label, next(own[label])) for label in labels]

    def first(self, label: str, count: int) -> list[Taken]:
        """The records of a data set that a fresh run begins with."""
        return [(label, number) for number in self.sources[label].first(count)]

    def where(self, one: Taken) -> str:
        """Names a record, for messages."""
        return self.sources[one[0]].where(one[1])

    def epochs(self) -> dict[str, float]:
        """How far each data set has come, for the metrics."""
        if not self.settings.sets:
            return {"epoch": self.sources[""].epoch(self.position)}
        return {
            f"data/{label}/epoch": source.epoch(self.taken_of(label))
            for label, source in self.sources.items()
        }
