"""RLOO."""

from cairn.orchestrator.advantages.advantage import have_spread
from cairn.orchestrator.rollouts import AnswerGroup


class Rloo:
    """RLOO (arXiv:2402.14740, eq. 8): an answer's reward less the mean of the others'; 0 without others."""

    def __call__(self, group: AnswerGroup) -> list[float]:
        rewards, others = group.rewards, len(group.rewards) - 1
        if not others or not have_spread(rewards):
            return [0.0] * len(rewards)
        total = sum(rewards)
        return [reward - (total - reward) / others for reward in rewards]
