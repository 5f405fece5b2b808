"""The forms that records of preferences may have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.config.preferences import PreferenceDataConfig
from cairn.run.data_sets import Check, examine, load_records
from cairn.trainer.data.pairs import answers_of, problem_of_pair


@dataclass(frozen=True)
class Form:
    """What records of one form are.

    answers: of a record, each as one of prompt and completion, and always equally many. sides: of these
    answers: 1 of a chosen one, -1 of a rejected one.
    """

    problem_of: Check
    answers: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    sides: Callable[[Mapping[str, Any]], Sequence[int]]


FORMS = {"pairs": Form(problem_of_pair, answers_of, lambda record: (1, -1))}
"""By name."""


def identity_of(config: PreferenceDataConfig, form: str) -> dict[str, Any]:
    """What identifies the records, once all are checked; see `cairn.run.data_sets.examine`.

    Raises:
        BadRecord: naming the first that can't be learned from.
    """
    return examine(config, load_records(config), FORMS[form].problem_of)
