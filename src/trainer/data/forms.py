"""The forms that records of preferences may have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.trainer.data import examples, pairs
from cairn.trainer.data.sources import Use


@dataclass(frozen=True, kw_only=True)
class Form(Use):
    """What records of one form are.

    answers: of a record, each as one of prompt and completion. sides: of these answers: 1 of a chosen or
    desirable one, -1 of one that is not.
    """

    order: str = field(default="preference order")
    answers: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    sides: Callable[[Mapping[str, Any]], Sequence[int]]


FORMS = {
    "pairs": Form(problem_of=pairs.problem_of_pair, answers=pairs.answers_of, sides=lambda record: (1, -1)),
    "examples": Form(
        problem_of=examples.problem_of_example,
        answers=examples.answers_of,
        sides=examples.sides_of,
        units=examples.answers_each,
        facts=examples.facts_of,
        problem_of_all=examples.problem_of_all,
        drops=False,
    ),
}
"""By name, as in `cairn.config.pair_loss.TOGETHER`."""
