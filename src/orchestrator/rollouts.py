"""Rollouts: a problem's sampled answers, their rewards and advantages."""

import statistics
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cairn.run.batches import Sample


class StalePolicy(Exception):
    """A server answered with another policy version than the one that was pushed."""


class AttemptOver(Exception):
    """The run was started anew; whoever served the earlier attempt has to join the new one."""


class Generation(Protocol):
    """One answer of a server: token ids, each token's logprob, and the version that produced it."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list
    finish_reason: str


class ServerStatus(Protocol):
    """Of a server's status, the name of the policy version that it has."""

    weight_version: str


class PolicyServer(Protocol):
    """What the orchestrator needs of an inference server's client."""

    url: str

    async def generate(
        self, prompt_ids: list[int], *, n: int, max_tokens: int, temperature: float, top_p: float,
        seed: int, stop_token_ids: list[int],
    ) -> list[Generation]:  # fmt: skip
        """`n` answers; answer i draws from `seed + i`."""
        ...

    async def status(self) -> "ServerStatus":
        """What the server says of itself."""
        ...

    async def update_weights(self, path: str, version: str) -> None:
        """Load a Hugging Face directory and report it as `version` from now on."""
        ...


@dataclass
class Rollout:
    """One answer to a problem: token ids, logprob and policy version of each token, and its reward."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[str]
    text: str
    reward: float
    complete: bool
    """Whether it ended by itself, rather than at the longest allowed length."""


@dataclass
class Group:
    """All rollouts of one problem; `place` is the problem's place in the run's prompt order."""

    place: int
    problem: int
    prompt_ids: list[int]
    rollouts: list[Rollout]


def token_versions(generation: Generation) -> list[str]:
    """The policy version that produced each token."""
    return [
        span.version for span in generation.weight_versions for _ in range(span.start, span.end)
    ]  # fmt: skip


def group_advantages(rewards: list[float], *, normalize: bool) -> list[float]:
    """GRPO's advantages (arXiv:2402.03300, section 4.1.2): rewards relative to their group's mean.

    With `normalize` they are divided by the group's standard deviation. A group whose rewards are all the
    same teaches nothing: its advantages are exactly 0.
    """
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) if normalize else 1.0
    return [(reward - mean) / scale for reward in rewards]


def to_samples(group: Group, *, normalize: bool) -> list[Sample]:
    """What the trainer learns from: prompt and answer tokens as the server saw and sampled them."""
    advantages = group_advantages([rollout.reward for rollout in group.rollouts], normalize=normalize)
    prompt = len(group.prompt_ids)
    samples = []
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        answer = len(rollout.token_ids)
        samples.append(
            Sample(
                token_ids=np.array(group.prompt_ids + rollout.token_ids, np.int32),
                loss_mask=np.array([False] * prompt + [True] * answer),
                logprobs=np.array([0.0] * prompt + rollout.logprobs, np.float32),
                advantages=np.array([0.0] * prompt + [advantage] * answer, np.float32),
            )
        )
    return samples


def batch_metrics(groups: list[Group]) -> dict[str, float]:
    """What a step's row in metrics.jsonl says about its rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "groups/zero_spread": sum(len({rollout.reward for rollout in g.rollouts}) == 1 for g in groups),
        "rollout/tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "rollout/length": statistics.fmean(len(rollout.token_ids) for rollout in rollouts),
        "rollout/cut_off": sum(not rollout.complete for rollout in rollouts) / len(rollouts),
    }
