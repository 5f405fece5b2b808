"""MaxRL."""

import statistics

from cairn.orchestrator.advantages.advantage import have_spread
from cairn.orchestrator.rollouts import AnswerGroup


class MaxRL:
    """MaxRL (arXiv:2602.02710): (r - mean) / mean of the group's rewards, so that rare successes weigh more.

    With rewards of 0 and 1, it estimates the gradient of the logarithm of a pass rate.
    """

    def __call__(self, group: AnswerGroup) -> list[float]:
        rewards = group.rewards
        if min(rewards) < 0:
            raise ValueError(f"maxrl divides by the mean reward, and needs rewards of 0 or more: {rewards}")
        if not have_spread(rewards):
            return [0.0] * len(rewards)
        mean = statistics.fmean(rewards)
        return [(reward - mean) / mean for reward in rewards]
