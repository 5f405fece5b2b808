"""Environments as the orchestrator asks them: off the event loop, within deadlines, with answers checked."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import Calls, shortened
from cairn.orchestrator.environments.times import CallTimes

MAX_TURNS = 10
"""Answers of a rollout, if an environment with turns has no `max_turns`."""


class AskedEnvironment(ABC):
    """An environment of the user's, and the threads that its methods are called on.

    Use as a context manager, or `close` it.
    """

    def __init__(self, environment: Any, config: OrchestratorConfig):
        self.environment = environment
        self.name = config.environment.called
        self.times = CallTimes()
        """Of the calls that answers wait for."""
        self.calls = Calls(f"environment {self.name!r}", config.reward_threads, config.reward_timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the environment's threads once their current calls have returned."""
        self.calls.close()

    @property
    def problems(self) -> int:
        """Number of problems: the length of an epoch."""
        return len(self.environment)

    @property
    def identity(self) -> str | None:
        """The environment's own `identity`, or None if it has none."""
        own = getattr(self.environment, "identity", None)
        return None if own is None else str(own)

    @staticmethod
    @abstractmethod
    def wrong_with(environment: Any) -> str | None:
        """Why the object is no environment of this kind, in words; None if it is one."""

    async def lacks(self) -> str | None:
        """What the environment needs and there is not, in words; None if there is nothing.

        Checked before a run starts. An environment that knows has a coroutine function `lacks`.
        """
        asks = getattr(self.environment, "lacks", None)
        return await asks() if asks else None

    @abstractmethod
    async def shown(self, problem: int) -> Any:
        """What a problem looks like before anything is answered: a resumed run compares it.

        Raises:
            EnvironmentFailed: the environment has no such problem, or an invalid one.
        """


def wrong_with_methods(environment: Any, methods: Mapping[str, tuple[str, ...]]) -> str | None:
    """Why the object is no set of problems with these methods, in words; None if it is one.

    Args:
        methods: the names of each method's arguments, by its name.
    """
    for name, arguments in methods.items():
        wanted = f"{name}({', '.join(arguments)})"
        method = getattr(environment, name, None)
        if not callable(method):
            return f"it has no method {wanted}"
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            return f"its {name} can't be called as {wanted}: {error}"
        except ValueError:
            pass  # inspect knows no signature of it
    try:
        problems = len(environment)
    except Exception as error:
        return f"len() of it, its number of problems, fails: {error!r}"
    return None if problems else "it has no problems: len() of it is 0"


def wrong_with_turns(environment: Any) -> str | None:
    """Why the environment's `max_turns`, which it need not have, is no number of turns; None if it is one."""
    turns = getattr(environment, "max_turns", MAX_TURNS)
    return None if isinstance(turns, int) and turns > 0 else f"its max_turns is {shortened(turns)}"
