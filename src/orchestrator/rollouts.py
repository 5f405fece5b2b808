"""The answers to a prompt: partial, then whole, then rewarded."""

from dataclasses import dataclass, field

from cairn.policy.generation import Generation
from cairn.run.messages import PolicyName


@dataclass
class Rollout:
    """One answer to a problem, whole or partial.

    token_ids, logprobs: for each token. versions: (policy version, start, end) of spans of tokens, each
    sampled by one policy. finish_reason: "stop" if the model ended it, "length" at the maximum length or at
    the end of the server's context, None while it is partial. text: set once it is whole. reward: a finite
    number, or None until the environment has returned it, perhaps some time after the answer is whole.
    """

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    reward: float | None = None

    def extend(self, generation: Generation, *, asked: int, longest: int) -> None:
        """Append newly sampled tokens.

        Args:
            asked: number of tokens requested; if fewer came without a stop, the server's context was full.
            longest: maximum number of tokens of a whole answer.
        """
        before = len(self.token_ids)
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += [(s.version, before + s.start, before + s.end) for s in generation.weight_versions]
        piece = generation.finish_reason == "length" and len(generation.token_ids) == asked
        goes_on = piece and len(self.token_ids) < longest
        self.finish_reason = None if goes_on else generation.finish_reason


@dataclass
class AnswerGroup:
    """All rollouts of one problem; `place` is the problem's place in the run's prompt order.

    policy_step: the policy that was served when the prompt was issued. prompt_ids: empty until the
    environment has returned the problem's messages.
    """

    place: int
    problem: int
    policy_step: int
    prompt_ids: list[int]
    rollouts: list[Rollout]

    @property
    def whole(self) -> bool:
        """Whether every answer is complete and rewarded."""
        return all(rollout.reward is not None for rollout in self.rollouts)

    @property
    def rewards(self) -> list[float]:
        """The reward of each answer; ValueError if one is missing."""
        rewards = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        if len(rewards) < len(self.rollouts):
            raise ValueError(f"prompt {self.place} has answers without a reward")
        return rewards

    @property
    def oldest_step(self) -> int:
        """Step of the oldest policy that sampled any of its tokens."""
        steps = (PolicyName.parse(version).step for version in self.versions)
        return min(steps, default=self.policy_step)

    @property
    def versions(self) -> set[str]:
        """The policy versions that sampled its tokens."""
        return {version for rollout in self.rollouts for version, _, _ in rollout.versions}
