"""Rollouts: a problem's sampled answers, their rewards and advantages."""

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from cairn.policy.generation import Generation, SamplingParams
from cairn.run.batches import Sample
from cairn.run.messages import PolicyName, Probe


class AttemptOver(Exception):
    """The run was started anew; whoever served the earlier attempt has to join the new one."""


class PolicyServers(Protocol):
    """What the orchestrator needs of the inference servers, however many there are."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a prompt and its answer may have together on every server; None if that is unknown."""
        ...

    async def serve(
        self, folder: str, version: str, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        """Have the servers load a Hugging Face directory as `version`, now and whenever they come back.

        They must reproduce the `probe`, or, if it follows, the one that `prove` is given later.
        """
        ...

    async def prove(self, probe: Probe) -> None:
        """Have the servers reproduce the probe of what they serve; until then no answer counts."""
        ...

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, affinity: int, versions: Collection[str]
    ) -> list[Generation]:
        """`params.n` continuations, all of whose tokens come from one of `versions`.

        Requests of the same `affinity` share a prefix, so one server is best for them. `versions` may change
        while this waits; what counts is what it holds when the answer is there.
        """
        ...

    def take_metrics(self) -> dict[str, float]:
        """For a step's row: what the servers did since the last call, such as `time/server_idle` seconds."""
        ...


@dataclass
class Rollout:
    """One answer to a problem, as far as it has come.

    token_ids, logprobs: of each token. versions: (policy version, start, end) of the spans that it sampled.
    finish_reason: "stop" if it ended by itself, "length" at the longest allowed length or at the end of the
    server's context, None while it is partial. text: once it is whole. reward: a finite number; None until
    the environment has said it, which may be some time after the answer is whole.
    """

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    reward: float | None = None

    def extend(self, generation: Generation, *, asked: int, longest: int) -> None:
        """Add what was sampled after the tokens that are there.

        Args:
            asked: how many tokens the server was asked for; where it stopped at fewer, its context was full.
            longest: how many tokens a whole answer has at most.
        """
        before = len(self.token_ids)
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += [(s.version, before + s.start, before + s.end) for s in generation.weight_versions]
        piece = generation.finish_reason == "length" and len(generation.token_ids) == asked
        goes_on = piece and len(self.token_ids) < longest
        self.finish_reason = None if goes_on else generation.finish_reason


@dataclass
class Group:
    """All rollouts of one problem; `place` is the problem's place in the run's prompt order.

    policy_step: of the policy that was served when the prompt was issued. prompt_ids: empty until the
    environment has said what its messages are.
    """

    place: int
    problem: int
    policy_step: int
    prompt_ids: list[int]
    rollouts: list[Rollout]

    @property
    def whole(self) -> bool:
        """Whether every answer is there, rewarded."""
        return all(rollout.reward is not None for rollout in self.rollouts)

    @property
    def oldest_step(self) -> int:
        """Of the oldest policy that any of its tokens come from."""
        steps = (PolicyName.parse(version).step for version in self.versions)
        return min(steps, default=self.policy_step)

    @property
    def versions(self) -> set[str]:
        """The policy versions that its tokens come from."""
        return {version for rollout in self.rollouts for version, _, _ in rollout.versions}


SPREAD = 1e-6
"""Rewards that differ by no more than this share of the largest one are equal: float32 is no more exact."""


def have_spread(rewards: list[float]) -> bool:
    """Whether the rewards differ by more than rounding."""
    return max(rewards) - min(rewards) > SPREAD * max(map(abs, rewards))


def group_advantages(rewards: list[float], *, normalize: bool) -> list[float]:
    """GRPO's advantages (arXiv:2402.03300, section 4.1.2): rewards relative to their group's mean.

    With `normalize` they are divided by the group's standard deviation. A group whose rewards are all the
    same, but for rounding, teaches nothing: its advantages are exactly 0.
    """
    if not have_spread(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) if normalize else 1.0
    return [(reward - mean) / scale for reward in rewards]


def to_samples(group: Group, *, normalize: bool) -> list[Sample]:
    """What the trainer learns from: prompt and answer tokens as the server saw and sampled them."""
    advantages = group_advantages([rollout.reward for rollout in group.rollouts], normalize=normalize)
    return [
        Sample.of_answer(group.prompt_ids, rollout.token_ids, logprobs=rollout.logprobs, advantages=advantage)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    ]


def batch_metrics(groups: list[Group], step: int) -> dict[str, float]:
    """What the row of optimiser step `step` in metrics.jsonl says about its rollouts.

    staleness: by how many steps the policy that sampled a token is behind the newest possible one.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts]
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
        "groups/zero_spread": sum(not have_spread([r.reward for r in group.rollouts]) for group in groups),
        "rollout/tokens": tokens,
        "rollout/length": tokens / len(rollouts),
        "rollout/cut_off": sum(rollout.finish_reason != "stop" for rollout in rollouts) / len(rollouts),
        "staleness/mean": sum(steps * count for steps, count in behind) / max(tokens, 1),
        "staleness/max": max((steps for steps, _ in behind), default=0),
    }
