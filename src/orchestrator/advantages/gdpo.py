"""GDPO, for several rewards."""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.orchestrator.advantages.advantage import Values, have_spread
from cairn.orchestrator.rollouts import AnswerGroup

logger = logging.getLogger(__name__)

UNSEEN = 64
"""Groups without a reward that has a weight after which its name is doubted."""


class Gdpo:
    """GDPO (arXiv:2601.05242): each named reward normalised in its group, then their sum over the batch.

    Rewards on different scales, or that rarely differ, then count by their weights. A reward that does not
    apply to an answer (None) is normalised over the answers that have it, and counts 0 for the others.
    """

    def __init__(self, weights: Mapping[str, Any] | None = None):
        """Take the weight of each part of the reward that counts."""
        if not weights:
            raise ValueError(
                "weights must name the parts of the reward that count, such as {correct = 1.0, short = 0.5}"
            )
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"weights.{name} = {weight!r} is not a finite number")
        self.weights = {name: float(weight) for name, weight in weights.items()}
        self._missed = dict.fromkeys(self.weights, 0)
        """How many groups, from the first one on, had no answer with that reward; -1 once one had."""

    def __call__(self, group: AnswerGroup) -> list[float]:
        total = [0.0] * len(group.rollouts)
        for name, weight in self.weights.items():
            rewards = self._rewards(group, name)
            there = [reward for reward in rewards if reward is not None]
            if len(there) > 1 and have_spread(there):
                mean, scale = statistics.fmean(there), statistics.stdev(there)
                total = [
                    t if r is None else t + weight * (r - mean) / scale
                    for t, r in zip(total, rewards, strict=True)
                ]
        return total

    def teaches(self, group: AnswerGroup) -> bool:
        """Whether the answers differ in a reward, though perhaps not in the sum."""
        found = [[r for r in self._rewards(group, name) if r is not None] for name in self.weights]
        return any(len(rewards) > 1 and have_spread(rewards) for rewards in found)

    def over_batch(self, groups: Sequence[AnswerGroup], values: Sequence[Values]) -> Sequence[Values]:
        """(A - mean) / standard deviation over all answers of the batch."""
        flat = [float(value) for of_group in values for value in of_group]  # pyright: ignore[reportArgumentType]
        if len(flat) < 2 or not have_spread(flat):
            return [[0.0] * len(of_group) for of_group in values]
        mean, scale = statistics.fmean(flat), statistics.stdev(flat)
        normal = iter([(value - mean) / scale for value in flat])
        return [[next(normal) for _ in of_group] for of_group in values]

    def _rewards(self, group: AnswerGroup, name: str) -> list[float | None]:
        """The reward of that name, where an answer has it.

        Raises:
            ValueError: no answer has any of the rewards that count, so that their names must be wrong.
        """
        there = {part for rollout in group.rollouts for part in rollout.parts}
        if not there & self.weights.keys():
            has = ", ".join(sorted(there)) or "none"
            raise ValueError(f"gdpo needs the reward {name!r}; the answers have {has}")
        if name in there:
            self._missed[name] = -1
        elif self._missed[name] >= 0:
            self._missed[name] += 1
            if self._missed[name] == UNSEEN:
                logger.warning(
                    "gdpo: no answer to the first %d prompts has the reward %r, which has a weight; but %s",
                    UNSEEN,
                    name,
                    ", ".join(sorted(there)),
                )
        return [rollout.parts.get(name) for rollout in group.rollouts]
