"""The forms that records of preferences may have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.config.preferences import PreferenceDataConfig
from cairn.run.data_sets import BadRecord, Check, examine, load_records
from cairn.trainer.data import examples, pairs


@dataclass(frozen=True)
class Form:
    """What records of one form are.

    problem_of: why a record can't be learned from. answers: of a record, each as one of prompt and
    completion. sides: of these answers: 1 of a chosen or desirable one, -1 of one that is not.
    units: how many units of learning each record of a data set is. problem_of_all: why a data set can't be
    learned from although each of its records could be.
    """

    problem_of: Check
    answers: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    sides: Callable[[Mapping[str, Any]], Sequence[int]]
    units: Callable[[Any], int]
    problem_of_all: Callable[[Any], str | None]


FORMS = {
    "pairs": Form(
        pairs.problem_of_pair,
        pairs.answers_of,
        lambda record: (1, -1),
        lambda records: 1,
        lambda records: None,
    ),
    "examples": Form(
        examples.problem_of_example,
        examples.answers_of,
        examples.sides_of,
        examples.answers_each,
        examples.problem_of_all,
    ),
}
"""By name, as in `cairn.config.pair_loss.TOGETHER`."""


def identity_of(config: PreferenceDataConfig, form: str, records: Any = None) -> dict[str, Any]:
    """What identifies the records, once all are checked; see `cairn.run.data_sets.examine`.

    Args:
        records: those that the configuration names, if they are loaded already.

    Raises:
        BadRecord: naming the first that can't be learned from.
    """
    records = load_records(config) if records is None else records
    found = examine(config, records, FORMS[form].problem_of)
    if problem := FORMS[form].problem_of_all(records):
        raise BadRecord(f"{config.name}: {problem}")
    return {**found, "records": FORMS[form].units(records) * found["records"]}
