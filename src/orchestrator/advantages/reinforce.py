"""REINFORCE++ and its variant with a baseline."""

import math
import statistics
from collections.abc import Sequence

from cairn.orchestrator.advantages.advantage import Values, have_spread
from cairn.orchestrator.rollouts import AnswerGroup


class ReinforcePlusPlus:
    """REINFORCE++ (arXiv:2501.03262): rewards, normalised over the tokens of the whole batch.

    It compares no answers to one prompt, so one answer to each is enough.
    """

    compares = False

    def __call__(self, group: AnswerGroup) -> list[float]:
        return group.rewards

    def over_batch(self, groups: Sequence[AnswerGroup], values: Sequence[Values]) -> Sequence[Values]:
        """(A - mean) / standard deviation over all tokens; 0 where all are equal."""
        lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        flat = [float(value) for of_group in values for value in of_group]  # pyright: ignore[reportArgumentType]
        tokens = sum(lengths)
        if not tokens or not have_spread([v for v, n in zip(flat, lengths, strict=True) if n]):
            return [[0.0] * len(group.rollouts) for group in groups]
        mean = math.fsum(v * n for v, n in zip(flat, lengths, strict=True)) / tokens
        variance = math.fsum((v - mean) ** 2 * n for v, n in zip(flat, lengths, strict=True)) / tokens
        normal = iter([(value - mean) / math.sqrt(variance) for value in flat])
        return [[next(normal) for _ in group.rollouts] for group in groups]


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++ with a baseline: rewards less their group's mean, normalised over the batch's tokens."""

    compares = True

    def __call__(self, group: AnswerGroup) -> list[float]:
        mean = statistics.fmean(group.rewards)
        return [reward - mean for reward in group.rewards]
