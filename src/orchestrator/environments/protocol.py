"""The environment protocol, and its errors."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from cairn.orchestrator.environments.rewards import Rewards
from cairn.run.errors import CairnError


class BadEnvironment(CairnError):
    """The environment can't be made; the message names it and the cause."""


class EnvironmentFailed(CairnError):
    """An environment raised, timed out, or returned an invalid conversation or reward.

    The message names the environment, the problem, the cause and, for a reward, the answer.
    """


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
