"""The sources of a run's records, as its settings name them; what identifies the records; and their order."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from cairn.config.data import RecordsConfig
from cairn.config.trainer import TrainerBase
from cairn.run.data_sets import BadRecord, identity_of, same_records
from cairn.run.seeds import Mixture
from cairn.trainer.data import preference_forms
from cairn.trainer.data.sources import SFT, Indexed, RecordSource, StreamSource, Use

SOURCES: dict[str, Callable[..., RecordSource]] = {"indexed": Indexed, "stream": StreamSource}
"""By what `read` of a data set says."""


def open_sources(settings: RecordsConfig, seed: int, use: Use = SFT) -> dict[str, RecordSource]:
    """The data sets by their labels, in the order of the settings; a single one has no label: "".

    Raises:
        BadRecord: one can't be read.
    """
    use = use.reading(settings)
    if not settings.sets:
        return {"": SOURCES[settings.read](settings, settings, seed, use=use)}
    return {one.called: SOURCES[one.read](one, settings, seed, one.called, use=use) for one in settings.sets}


def weights_of(settings: RecordsConfig) -> list[float]:
    """Each data set's share of the records, in relation to the others."""
    return [one.weight for one in settings.sets] or [1.0]


def identity_of_all(
    settings: RecordsConfig, sources: dict[str, RecordSource], use: Use = SFT
) -> dict[str, Any]:
    """What identifies the data, all records of which are checked where that can be done before training.

    Raises:
        BadRecord: naming the setting and the first record that can't be trained on.
    """
    each = [source.identity() for source in sources.values()]
    if problem := use.problem_of_all(each):
        raise BadRecord(f"{settings.names}: {problem}")
    return (
        identity_of(list(zip(sources, weights_of(settings), each, strict=True))) if settings.sets else each[0]
    )


def kept_identity(
    settings: RecordsConfig, identity: dict[str, Any], recipe: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The identity that the run's recipe has for these records; `identity` itself for a new run.

    Raises:
        BadRecord: they are not the records that the run was started with.
    """
    kept = recipe.get("data", identity)
    if not same_records(identity, kept):
        raise BadRecord(
            f"{settings.setting} {settings.names} holds other records than when the run was started"
        )
    return kept


def _of_sft(config: Any) -> dict[str, Any]:
    return identity_of_all(config.data, open_sources(config.data, seed=0))


def _of_preferences(config: Any) -> dict[str, Any]:
    form = preference_forms.FORMS[config.loss.form]
    return identity_of_all(config.data, open_sources(config.data, 0, form), form)


IDENTITIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sft": _of_sft,
    "dpo": _of_preferences,
    "reward": _of_preferences,
}
"""By the task's name; a task whose batches come from elsewhere has none."""


def identity_of_records(config: TrainerBase) -> dict[str, Any] | None:
    """The records' identity, once all are checked; None if the task has no records.

    Raises:
        BadRecord: naming the setting and the first record that can't be trained on.
    """
    find: Callable[[Any], dict[str, Any]] | None = IDENTITIES.get(config.task)
    if find is None:
        return None
    settings: Any = config
    try:
        return find(settings)
    except BadRecord as error:
        raise BadRecord(f"{settings.data.setting} {error}") from None


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
