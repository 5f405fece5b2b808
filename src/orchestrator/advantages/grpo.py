"""GRPO and Dr. GRPO."""

import statistics

from cairn.orchestrator.advantages.advantage import have_spread
from cairn.orchestrator.rollouts import AnswerGroup


class Grpo:
    """GRPO (arXiv:2402.03300, section 4.1.2): rewards relative to their group's mean.

    `normalize` divides the centred rewards by the group's standard deviation; without it, this is Dr. GRPO.
    If the rewards of a group are equal up to rounding, its advantages are exactly 0.
    """

    def __init__(self, normalize: bool = True):
        if not isinstance(normalize, bool):
            raise ValueError(f"normalize is true or false, not {normalize!r}")
        self.normalize = normalize

    def __call__(self, group: AnswerGroup) -> list[float]:
        rewards = group.rewards
        if not have_spread(rewards):
            return [0.0] * len(rewards)
        mean = statistics.fmean(rewards)
        scale = statistics.stdev(rewards) if self.normalize else 1.0
        return [(reward - mean) / scale for reward in rewards]


class DrGrpo(Grpo):
    """Dr. GRPO (arXiv:2503.20783): GRPO without the standard deviation."""

    def __init__(self):
        super().__init__(normalize=False)
