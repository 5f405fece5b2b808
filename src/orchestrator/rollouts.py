"""The answers to a prompt: partial, then whole, then rewarded."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cairn.orchestrator.environments.protocol import unscored
from cairn.policy.generation import Generation, RoutedExperts
from cairn.run.messages import PolicyName

LEAST = 2
"""Minimum number of answers to a prompt that can be compared with each other."""


class Sampled:
    """What was sampled from the model in one call."""

    token_ids: "list[int] | array[int]"
    logprobs: "list[float] | array[float]"
    versions: list[tuple[str, int, int]]
    finish_reason: str | None
    recorded: int | None
    """How many of the tokens the ledger has; None: it has no row of this. Only the ledger sets it."""
    experts: list[RoutedExperts]
    """Those that the ledger does not have yet; all of them while a batch is made (`Ledger.take_experts`)."""

    @property
    def began(self) -> str | None:
        """The policy that has sampled its first token, if there is one."""
        return self.versions[0][0] if self.versions else None

    def extend(self, generation: Generation, *, asked: int, longest: int) -> None:
        """Append newly sampled tokens.

        Args:
            asked: number of tokens requested; if fewer came without a stop, the server's context was full.
            longest: maximum number of tokens of a whole answer.
        """
        before = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.logprobs.extend(generation.logprobs)
        self.versions += [(s.version, before + s.start, before + s.end) for s in generation.weight_versions]
        if generation.experts is not None:
            self.experts.append(generation.experts)
        piece = generation.finish_reason == "length" and len(generation.token_ids) == asked
        goes_on = piece and len(self.token_ids) < longest
        self.finish_reason = None if goes_on else generation.finish_reason

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens only, of which a stop string is the end."""
        del self.token_ids[count:], self.logprobs[count:]
        self.versions[:] = [
            (name, first, min(last, count)) for name, first, last in self.versions if first < count
        ]
        self.finish_reason = "stop"


@dataclass
class Turn(Sampled):
    """One answer of the model to a rollout that is a program.

    number: among all recorded calls of the rollout. request: digest of what was asked. branch: the sequence
    of tokens that it belongs to; its context is the first `kept` tokens of the branch, which are all there
    are, and then prompt_ids. token_ids, logprobs, versions, finish_reason: as of a `Rollout`.
    """

    number: int
    request: str
    branch: int
    kept: int
    prompt_ids: "array[int]"
    token_ids: "list[int] | array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "list[float] | array[float]" = field(default_factory=lambda: array("f"))
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    recorded: int | None = field(default=None, compare=False, repr=False)
    experts: list[RoutedExperts] = field(default_factory=list[RoutedExperts], compare=False, repr=False)


@dataclass(frozen=True)
class Call:
    """One recorded answer of the world to a rollout that is a program; `result` is JSON text."""

    number: int
    name: str
    result: str


@dataclass
class Rollout(Sampled):
    """One answer to a problem, whole or partial.

    token_ids: int32. logprobs: float32, one for each token. versions: (policy version, start, end) of spans
    of tokens, each sampled by one policy. finish_reason: "stop" if the model or a stop string ended it,
    "length" at the maximum length or at the end of the server's context, None while it is partial. text: set
    once it is whole; of a program, all that was sampled last. reward: a finite number, or None until the
    environment has returned it, perhaps some time after the answer is whole. parts: of the reward, by name.
    failed: why there will be no reward, after retries; None otherwise. diverged: how often, after a restart,
    a program asked something else than is recorded. begun: when it was begun (`time.monotonic`), or None if
    another process did that; seconds: from then to its reward.

    turns: of an answer that is a program, once it is whole; token_ids, logprobs and versions are then those
    of all turns, one after the other. Also of a program that has failed, as far as it has come.
    """

    seed: int
    token_ids: "list[int] | array[int]" = field(default_factory=list[int])
    logprobs: "list[float] | array[float]" = field(default_factory=list[float])
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict[str, float])
    failed: str | None = None
    diverged: int = 0
    turns: list[Turn] = field(default_factory=list[Turn])
    recorded: int | None = field(default=None, compare=False, repr=False)
    experts: list[RoutedExperts] = field(default_factory=list[RoutedExperts], compare=False, repr=False)
    begun: float | None = field(default=None, compare=False)
    seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # What the ledger gives back after a restart must be what was there before it, to the bit.
        self.token_ids, self.logprobs = array("i", self.token_ids), array("f", self.logprobs)

    @property
    def sampled(self) -> int:
        """How many tokens were sampled, also of a program that is not whole."""
        return self.versions[-1][2] if self.versions else len(self.token_ids)

    @property
    def decided(self) -> bool:
        """Whether it is rewarded or has failed."""
        return self.reward is not None or self.failed is not None

    def note_seconds(self) -> None:
        """Note how long it took, now that it is rewarded."""
        self.seconds = None if self.begun is None else time.monotonic() - self.begun

    def add_spans(self, spans: Sequence[tuple[str, int, int]]) -> None:
        """Note the policy versions of tokens that follow those noted so far; the spans count from these."""
        end = self.versions[-1][2] if self.versions else 0
        for version, first, last in spans:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = version, self.versions[-1][1], end + last
            else:
                self.versions.append((version, end + first, end + last))

    def take(self, turns: Sequence[Turn]) -> None:
        """Hold the turns of a program that is whole, and their tokens one after the other."""
        self.turns, self.token_ids, self.logprobs = list(turns), array("i"), array("f")
        self.versions = []
        for turn in turns:
            self.token_ids.extend(turn.token_ids)
            self.logprobs.extend(turn.logprobs)
            self.add_spans(turn.versions)


@dataclass(frozen=True)
class SharedFrom:
    """Which branch of the run has sampled the answers to a prompt that another branch learns from.

    since: the step from which both branches have started.
    """

    branch: str
    since: int


@dataclass
class AnswerGroup:
    """All rollouts of one problem; `place` is the problem's place in the run's prompt order.

    policy_step: the policy that was served when the prompt was issued. prompt_ids: empty until the
    environment has returned the problem's messages. environment: its number among the run's environments.
    shared: whose the answers are, if another branch has sampled them all.
    """

    place: int
    problem: int
    policy_step: int
    prompt_ids: list[int]
    rollouts: list[Rollout]
    environment: int = 0
    shared: SharedFrom | None = None

    @property
    def whole(self) -> bool:
        """Whether every answer is complete and rewarded, or has failed."""
        return all(rollout.decided for rollout in self.rollouts)

    @property
    def learned(self) -> "AnswerGroup":
        """The group without the answers that have failed."""
        return replace(self, rollouts=[rollout for rollout in self.rollouts if rollout.failed is None])

    @property
    def usable(self) -> bool:
        """Whether it is whole, with answers enough to learn from."""
        return self.whole and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why nothing can be learned from a whole group: too many of its answers have failed."""
        reasons = [rollout.failed for rollout in self.rollouts if rollout.failed is not None]
        left = len(self.rollouts) - len(reasons)
        return reasons[0] if reasons and left < min(LEAST, len(self.rollouts)) else None

    @property
    def unscored(self) -> bool:
        """Whether answers are missing only because the environment has nothing to say of them."""
        reasons = [rollout.failed for rollout in self.rollouts if rollout.failed is not None]
        return bool(reasons) and all(map(unscored, reasons))

    @property
    def rewards(self) -> list[float]:
        """The reward of each answer; ValueError if one is missing."""
        rewards = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        if len(rewards) < len(self.rollouts):
            raise ValueError(f"prompt {self.place} has answers without a reward")
        return rewards

    @property
    def sampled(self) -> int:
        """How many tokens were sampled for all its answers."""
        return sum(rollout.sampled for rollout in self.rollouts)

    @property
    def oldest_step(self) -> int:
        """Step of the oldest policy that sampled any of its tokens, counted as in `step_of`."""
        return min(map(self.step_of, self.versions), default=self.policy_step)

    def step_of(self, version: str) -> int:
        """The step of a policy that has sampled tokens of it, by the policy's name.

        One of another branch, n steps after the step from which both have started, counts as n steps before
        it: as many are between the two branches' policies as if this branch had taken all of them.
        """
        step = PolicyName.parse(version).step
        return step if self.shared is None else mirrored(step, self.shared.since)

    @property
    def versions(self) -> set[str]:
        """The policy versions that sampled its tokens."""
        return {version for rollout in self.rollouts for version, _, _ in rollout.versions}


def mirrored(step: int, since: int) -> int:
    """The step of another branch's policy as this branch counts it; see `AnswerGroup.step_of`."""
    return 2 * since - step
