"""The answers to a prompt, as they come."""

from dataclasses import dataclass, field

from cairn.policy.generation import Generation
from cairn.run.messages import PolicyName


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
class AnswerGroup:
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
    def rewards(self) -> list[float]:
        """Of the answers, all of which are whole."""
        rewards = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        if len(rewards) < len(self.rollouts):
            raise ValueError(f"prompt {self.place} has answers without a reward")
        return rewards

    @property
    def oldest_step(self) -> int:
        """Of the oldest policy that any of its tokens come from."""
        steps = (PolicyName.parse(version).step for version in self.versions)
        return min(steps, default=self.policy_step)

    @property
    def versions(self) -> set[str]:
        """The policy versions that its tokens come from."""
        return {version for rollout in self.rollouts for version, _, _ in rollout.versions}
