"""What is learned from answers that are cut off by the length limit, or come close to it.

The environment's rewards stay as they are, in the ledger, in `rollouts/` and in metrics.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.rollouts import AnswerGroup, Rollout


class Overlong(Protocol):
    """What is learned from answers of an environment that are too long."""

    def compared(self, group: AnswerGroup) -> AnswerGroup:
        """The group with the rewards by which its answers are compared; none of its answers has failed."""
        ...

    def masks(self, rollout: Rollout) -> bool:
        """Whether nothing is learned from the answer, though its reward counts for those of its group."""
        ...


class Learn:
    """They are learned from like all others."""

    def compared(self, group: AnswerGroup) -> AnswerGroup:
        return group

    def masks(self, rollout: Rollout) -> bool:
        """Never."""
        return False


class Mask(Learn):
    """Nothing is learned from those that are cut off. Source: DAPO, arXiv:2503.14476, section 3.4."""

    def masks(self, rollout: Rollout) -> bool:
        """Whether it is cut off."""
        return rollout.finish_reason == "length"


class Shape(Learn):
    """They lose reward the closer they come to the limit: DAPO's soft overlong punishment (equation 13).

    With the limit m, the buffer b and an answer of n tokens, that is penalty * clip((n - (m - b)) / b, 0, 1);
    an answer that is cut off loses all of the penalty. Of a program, the longest answer of the model counts.
    """

    def __init__(self, limit: int, buffer: int, penalty: float):
        self.limit, self.buffer, self.penalty = limit, buffer, penalty

    def compared(self, group: AnswerGroup) -> AnswerGroup:
        """With shaped rewards."""
        shaped = [
            replace(rollout, reward=reward - self.loss(rollout))
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        ]
        return replace(group, rollouts=shaped)

    def loss(self, rollout: Rollout) -> float:
        """What the answer loses of its reward."""
        if rollout.finish_reason == "length":
            return self.penalty
        answers = rollout.turns or [rollout]
        longest = max(len(answer.token_ids) for answer in answers)
        over = (longest - (self.limit - self.buffer)) / self.buffer
        return self.penalty * min(max(over, 0.0), 1.0)


KINDS: dict[str, Callable[[OrchestratorConfig], Overlong]] = {
    "learn": lambda _: Learn(),
    "mask": lambda _: Mask(),
    "shape": lambda config: Shape(
        config.sampling.max_tokens, config.overlong.buffer, config.overlong.penalty
    ),
}


def make_overlong(config: OrchestratorConfig) -> Overlong:
    """What the settings of an environment say of its answers that are too long."""
    return KINDS[config.overlong.type](config)
