"""What an environment is, and what can be wrong with it."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from cairn.run.errors import CairnError


class BadEnvironment(CairnError):
    """The environment can't be made; the message names it and what is wrong."""


class EnvironmentFailed(CairnError):
    """An environment raised, took too long, or returned what is no conversation or no reward.

    The message names the environment, the problem, for a reward the answer, and what happened.
    """


class Environment(Protocol):
    """A fixed set of problems, each of which is asked once and answered once.

    Problem i is the same in every process and every run. `messages` and `reward` may be coroutines. Both are
    called from a thread of their own, one call at a time unless `orchestrator.reward_threads` allows more.
    An attribute `identity`, if there is one, is text that changes when the problems or rewards do.
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def messages(self, problem: int) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """The conversation that asks problem number `problem`."""
        ...

    def reward(self, problem: int, answer: str) -> float | Awaitable[float]:
        """How good `answer` is, for example from 0 to 1; a finite number, also one of numpy or torch."""
        ...
