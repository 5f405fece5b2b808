"""GDPO, for several rewards."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.orchestrator.advantages.advantage import Values, have_spread
from cairn.orchestrator.rollouts import AnswerGroup


class Gdpo:
    """GDPO (arXiv:2601.05242): each named reward normalised in its group, then their sum over the batch.

    Rewards on different scales, or that rarely differ, then count by their weights.
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

    def __call__(self, group: AnswerGroup) -> list[float]:
        total = [0.0] * len(group.rollouts)
        for name, weight in self.weights.items():
            rewards = self._rewards(group, name)
            if have_spread(rewards):
                mean, scale = statistics.fmean(rewards), statistics.stdev(rewards)
                total = [t + weight * (r - mean) / scale for t, r in zip(total, rewards, strict=True)]
        return total

    def teaches(self, group: AnswerGroup) -> bool:
        """Whether the answers differ in a reward, though perhaps not in the sum."""
        return any(have_spread(self._rewards(group, name)) for name in self.weights)

    def over_batch(self, groups: Sequence[AnswerGroup], values: Sequence[Values]) -> Sequence[Values]:
        """(A - mean) / standard deviation over all answers of the batch."""
        flat = [float(value) for of_group in values for value in of_group]  # pyright: ignore[reportArgumentType]
        if len(flat) < 2 or not have_spread(flat):
            return [[0.0] * len(of_group) for of_group in values]
        mean, scale = statistics.fmean(flat), statistics.stdev(flat)
        normal = iter([(value - mean) / scale for value in flat])
        return [[next(normal) for _ in of_group] for of_group in values]

    @staticmethod
    def _rewards(group: AnswerGroup, name: str) -> list[float]:
        for rollout in group.rollouts:
            if name not in rollout.parts:
                there = ", ".join(rollout.parts) or "none"
                raise ValueError(f"gdpo needs the reward {name!r} of each answer; an answer has {there}")
        return [rollout.parts[name] for rollout in group.rollouts]
