"""Generalised advantage estimation, of which the orchestrator ships the rewards only."""

import itertools

from cairn.orchestrator.rollouts import AnswerGroup, Rollout


class Gae:
    """Rewards as they are: the trainer computes advantages from them and from its critic's values.

    The last token that was sampled gets the answer's reward; in a program, that of each branch, as each is a
    sequence of its own.
    """

    column = "rewards"
    compares = False

    def __call__(self, group: AnswerGroup) -> list[list[float]]:
        return [
            self._at_ends(rollout, reward)
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        ]

    @staticmethod
    def _at_ends(rollout: Rollout, reward: float) -> list[float]:
        """The reward at the last token of each branch, and 0 at the others."""
        values = [0.0] * len(rollout.token_ids)
        lengths = [len(turn.token_ids) for turn in rollout.turns]
        turns = zip(rollout.turns, lengths, itertools.accumulate(lengths), strict=True)
        ends = {turn.branch: end for turn, length, end in turns if length}
        for end in ends.values() if rollout.turns else [len(values)]:
            if end:
                values[end - 1] = reward
        return values
