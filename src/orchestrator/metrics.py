"""The metrics of a batch's answers, for metrics.jsonl."""

import statistics
from collections.abc import Callable, Iterable

import numpy as np

from cairn.orchestrator.advantages import have_spread
from cairn.orchestrator.environments import COUNTED
from cairn.orchestrator.environments.protocol import unscored
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.batches import Sample


def batch_metrics(
    groups: list[AnswerGroup],
    step: int,
    differ: Callable[[AnswerGroup], bool] = lambda group: have_spread(group.rewards),
    teaches: Callable[[AnswerGroup], bool] | None = None,
) -> dict[str, float]:
    """Metrics of the rollouts in the batch of optimiser step `step`.

    The staleness of a token is the number of steps by which the policy that sampled it is behind the newest
    policy that could have.

    Args:
        differ: whether the answers of a group differ in what is learned from.
        teaches: whether anything is learned from a group; by default `differ`.
    """
    teaches = teaches or differ
    flat = [group for group in groups if not have_spread(group.rewards)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    behind = [
        (step - 1 - group.step_of(version), end - start)
        for group in groups
        for rollout in group.rollouts
        for version, start, end in rollout.versions
    ]
    named: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, part in rollout.parts.items():
            named.setdefault(name, []).append(part)
    parts = {
        f"rollout/{name}" if name in COUNTED else f"reward/{name}/mean": statistics.fmean(values)
        for name, values in sorted(named.items())
    }
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **parts,
        "groups/zero_spread": sum(not differ(group) for group in groups),
        "groups/unlearned": sum(not teaches(group) for group in groups),
        "groups/all_best": sum(_is_best(group.rewards[0], rewards) for group in flat),
        "groups/all_worst": sum(_is_worst(group.rewards[0], rewards) for group in flat),
        "rollout/tokens": tokens,
        "rollout/length": tokens / len(rollouts),
        "rollout/length_min": min(len(rollout.token_ids) for rollout in rollouts),
        "rollout/length_max": max(len(rollout.token_ids) for rollout in rollouts),
        "rollout/cut_off": sum(rollout.finish_reason != "stop" for rollout in rollouts) / len(rollouts),
        "staleness/mean": sum(steps * count for steps, count in behind) / max(tokens, 1),
        "staleness/max": max((steps for steps, _ in behind), default=0),
        **_turns(rollouts),
    }


def _is_best(reward: float, rewards: Iterable[float]) -> bool:
    """Whether it is the best reward of a batch; where all are equal, above 0."""
    least, most = min(rewards), max(rewards)
    return reward > 0 if least == most else reward == most


def _is_worst(reward: float, rewards: Iterable[float]) -> bool:
    """Whether it is the worst; where all are equal, 0 or below."""
    least, most = min(rewards), max(rewards)
    return reward <= 0 if least == most else reward == least


def advantage_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """How far advantages are spread over the learned tokens; nothing if there are none.

    A trainer that computes advantages itself reports them.
    """
    found = [
        sample.columns["advantages"][sample.loss_mask] for sample in samples if "advantages" in sample.columns
    ]
    values = np.concatenate(found).astype(np.float64) if found else np.empty(0)
    if not values.size:
        return {}
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std()),
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
    }


def rollout_counts(groups: list[AnswerGroup]) -> dict[str, float]:
    """How many rollouts there are, how many of them have failed, and how often one has diverged.

    A rollout without a reward has failed; it is unscored if the environment has returned None for it.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "rollouts/all": len(rollouts),
        "rollouts/unscored": sum(unscored(rollout.failed) for rollout in rollouts),
        "rollouts/failed": sum(rollout.failed is not None for rollout in rollouts),
        "rollouts/diverged": sum(rollout.diverged for rollout in rollouts),
    }


def of_environment(
    groups: list[AnswerGroup],
    step: int,
    differ: Callable[[AnswerGroup], bool],
    teaches: Callable[[AnswerGroup], bool],
) -> dict[str, float]:
    """The metrics of one of several environments in the batch of `step`, of which it may have no group.

    Args:
        differ, teaches: as in `batch_metrics`.
    """
    found = {"groups": len(groups), **rollout_counts(groups)}
    if not groups:
        return found
    return {**batch_metrics([group.learned for group in groups], step, differ, teaches), **found}


def _turns(rollouts: list[Rollout]) -> dict[str, float]:
    """Metrics of the rollouts that are programs; none if none is one."""
    programs = [rollout.turns for rollout in rollouts if rollout.turns]
    if not programs:
        return {}
    branches = [len({turn.branch for turn in turns}) for turns in programs]
    return {
        "rollout/turns": statistics.fmean(map(len, programs)),
        "rollout/branches": statistics.fmean(branches),
    }
