"""What an advantage is."""

from collections.abc import Sequence
from typing import Protocol

from cairn.orchestrator.rollouts import AnswerGroup
from cairn.run.errors import CairnError

SPREAD = 1e-6
"""Rewards that differ by at most this fraction of the largest one count as equal (float32 rounding)."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""One number for each answer, or for each answer a list with one number for each of its tokens."""


class AdvantageFailed(CairnError):
    """An advantage raised an error or returned unusable values; the message names the problem and values."""


class Advantage(Protocol):
    """Compares the answers to one prompt. It is called on the event loop, so it may compute but must not
    block.

    It must be deterministic: a batch that is rebuilt after a crash must equal the first one. A class needs
    `__call__` only. It may have two methods more: `teaches(group) -> bool`, whether anything can be learned
    from a group, in the place of `compares`; and `over_batch`, as `OverBatch` has it.
    """

    column: str = "advantages"
    """The column of batches (`cairn.run.batches.COLUMNS`) that holds its numbers; with `rewards`, the trainer
    computes advantages from them, and needs a critic."""
    compares: bool = True
    """Whether it compares the answers to a prompt, so that nothing is learned where all rewards are equal."""

    def __call__(self, group: AnswerGroup, /) -> Values:
        """The advantage of each answer, or of each token of each answer, in the order of `group.rollouts`."""
        ...


class OverBatch(Protocol):
    """An advantage that looks at a whole batch once it has looked at each group."""

    def over_batch(self, groups: Sequence[AnswerGroup], values: Sequence[Values], /) -> Sequence[Values]:
        """The advantages of all groups of one environment in a batch.

        Args:
            groups: in the order of the batch.
            values: what `__call__` has returned for each of them.
        """
        ...


def column_of(advantage: Advantage) -> str:
    """`Advantage.column`, which a class need not say."""
    return getattr(advantage, "column", Advantage.column)


def teaches(advantage: Advantage, group: AnswerGroup) -> bool:
    """Whether anything can be learned from a group; see `Advantage`.

    Raises:
        AdvantageFailed: its own method raises.
    """
    judges = callable(getattr(advantage, "teaches", None)) or getattr(
        advantage, "compares", Advantage.compares
    )
    return not judges or differ(advantage, group)


def differ(advantage: Advantage, group: AnswerGroup) -> bool:
    """Whether the answers of a group differ: as the advantage's own `teaches` has it, otherwise in reward.

    Raises:
        AdvantageFailed: its own method raises.
    """
    own = getattr(advantage, "teaches", None)
    if not callable(own):
        return have_spread(group.rewards)
    try:
        return bool(own(group))
    except Exception as error:  # the user's own code
        raise AdvantageFailed(
            f"teaches of the advantage {type(advantage).__name__}, for problem {group.problem}, raised "
            f"{type(error).__name__}: {error}"
        ) from error


def have_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by more than rounding."""
    return max(rewards) - min(rewards) > SPREAD * max(map(abs, rewards))
