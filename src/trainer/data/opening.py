"""The sources of a run's records, as its settings name them."""

from collections.abc import Callable
from typing import Any

from cairn.config.data import RecordsConfig
from cairn.run.data_sets import BadRecord, identity_of
from cairn.trainer.data.sources import SFT, Indexed, Source, Use
from cairn.trainer.data.streaming import Stream

SOURCES: dict[str, Callable[..., Source]] = {"indexed": Indexed, "stream": Stream}
"""By what `read` of a data set says."""


def open_sources(settings: RecordsConfig, seed: int, use: Use = SFT) -> dict[str, Source]:
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


def identity_of_all(settings: RecordsConfig, sources: dict[str, Source], use: Use = SFT) -> dict[str, Any]:
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
