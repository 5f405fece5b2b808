"""The metrics of a batch's answers, for metrics.jsonl."""

import statistics

from cairn.orchestrator.advantages import have_spread
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.run.messages import PolicyName


def batch_metrics(groups: list[AnswerGroup], step: int) -> dict[str, float]:
    """Metrics of the rollouts in the batch of optimiser step `step`.

    The staleness of a token is the number of steps by which the policy that sampled it is behind the newest
    policy that could have.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    behind = [
        (step - 1 - PolicyName.parse(version).step, end - start)
        for rollout in rollouts
        for version, start, end in rollout.versions
    ]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "groups/zero_spread": sum(not have_spread(group.rewards) for group in groups),
        "rollout/tokens": tokens,
        "rollout/length": tokens / len(rollouts),
        "rollout/cut_off": sum(rollout.finish_reason != "stop" for rollout in rollouts) / len(rollouts),
        "staleness/mean": sum(steps * count for steps, count in behind) / max(tokens, 1),
        "staleness/max": max((steps for steps, _ in behind), default=0),
    }
