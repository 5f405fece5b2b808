"""The environment protocol, and its errors."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from cairn.orchestrator.environments.rewards import Rewards
from cairn.orchestrator.failures import UNSCORED
from cairn.run.errors import CairnError
from cairn.run.output import quoted


class BadEnvironment(CairnError):
    """The environment can't be made; the message names it and the cause."""


class EnvironmentFailed(CairnError):
    """An environment raised, timed out, or returned an invalid conversation or reward.

    The message names the environment, the problem, the cause and, for a reward, the answer. What it quotes is
    text from outside, so it is made writable and is cut if it is long.

    Args:
        passing: whether another try may succeed.
    """

    def __init__(self, message: str, *, passing: bool = True):
        super().__init__(quoted(message))
        self.passing = passing

    def of(self, whose: str) -> "EnvironmentFailed":
        """The same failure, where it is known whose it is."""
        return EnvironmentFailed(f"{whose}: {self}", passing=self.passing)


class Unscored(EnvironmentFailed):
    """The environment has nothing to say of an answer: its reward is None. That is no failure."""

    def __init__(self, message: str):
        super().__init__(UNSCORED + message, passing=False)
        self._message = message

    def of(self, whose: str) -> EnvironmentFailed:
        return Unscored(f"{whose}: {self._message}")


Reward = float | Mapping[str, float] | Rewards
"""What an environment says of an answer."""


class Environment(Protocol):
    """A fixed set of problems; the model gives one answer to each problem's conversation.

    Problem i must be the same in every process and every run. `messages` and `reward` may be coroutines. Both
    are called from a separate thread, one call at a time unless `orchestrator.reward_threads` allows more.
    The optional attribute `identity` is text that must change whenever the problems or rewards do.
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def messages(self, problem: int) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """The conversation that asks problem number `problem`."""
        ...

    def reward(self, problem: int, answer: str) -> Reward | Awaitable[Reward]:
        """How good `answer` is, for example from 0 to 1: one finite number (Python, numpy or torch), or
        several by name, as a mapping that adds up to the reward or as `Rewards` with weights."""
        ...
