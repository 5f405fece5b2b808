"""What identifies the records of each task, for a run's recipe."""

from collections.abc import Callable
from typing import Any

from cairn.config.trainer import TrainerBase
from cairn.run.data_sets import BadRecord
from cairn.trainer.data import forms, opening


def _of_sft(config: Any) -> dict[str, Any]:
    return opening.identity_of_all(config.data, opening.open_sources(config.data, seed=0))


def _of_preferences(config: Any) -> dict[str, Any]:
    form = forms.FORMS[config.loss.form]
    return opening.identity_of_all(config.data, opening.open_sources(config.data, 0, form), form)


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
