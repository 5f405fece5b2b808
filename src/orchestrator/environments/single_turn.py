"""Single-turn environments as the orchestrator uses them: one conversation, one answer, one reward."""

import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any, Self

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import Calls, shortened
from cairn.orchestrator.environments.protocol import Environment, EnvironmentFailed

LARGEST_REWARD = 1e37
"""Largest absolute reward: advantages are stored as float32, whose maximum is 3.4e38."""


class SingleTurn:
    """Asks an environment for conversations and rewards off the event loop, and checks what it returns.

    Use as a context manager, or `close` it.
    """

    def __init__(self, environment: Environment, config: OrchestratorConfig):
        self.environment = environment
        self.name = config.environment.name
        self._calls = Calls(f"environment {self.name!r}", config.reward_threads, config.reward_timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the environment's threads once their current calls have returned."""
        self._calls.close()

    @property
    def problems(self) -> int:
        """Number of problems: the length of an epoch."""
        return len(self.environment)

    @property
    def identity(self) -> str | None:
        """The environment's own `identity`, or None if it has none."""
        own = getattr(self.environment, "identity", None)
        return None if own is None else str(own)

    async def messages(self, problem: int) -> list[Mapping[str, Any]]:
        """The conversation that asks problem number `problem`.

        Raises:
            EnvironmentFailed: the environment raised, timed out, or returned something else.
        """
        found = await self._calls.call(self.environment.messages, f"messages({problem})", problem)
        if wrong := _wrong_with_conversation(found):
            raise EnvironmentFailed(
                f"environment {self.name!r}: messages({problem}) must return a list of messages such as "
                f'[{{"role": "user", "content": "..."}}], and {wrong}'
            )
        return list(found)

    async def reward(self, problem: int, answer: str) -> float:
        """How good `answer` is: a finite number.

        Raises:
            EnvironmentFailed: the environment raised, timed out, or returned something else.
        """
        what = f"reward of problem {problem}"
        about = f"; the answer was {shortened(answer)}"
        found = await self._calls.call(self.environment.reward, what, problem, answer, about=about)
        reward = to_reward(found)
        if reward is None:
            hint = " (is there a path without a `return`?)" if found is None else ""
            raise EnvironmentFailed(
                f"environment {self.name!r}: {what} must be one finite number, and is "
                f"{shortened(found)}, of type {type(found).__name__}{hint}{about}"
            )
        return reward


def to_reward(value: Any) -> float | None:
    """`value` as a finite float; None if it is not one finite number.

    Accepted are Python numbers, and scalars and one-element arrays or tensors of numpy and torch.
    """
    if callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return None
    if not isinstance(value, numbers.Real):
        return None
    try:
        reward = float(value)
    except OverflowError:
        return None
    return reward if math.isfinite(reward) and abs(reward) <= LARGEST_REWARD else None


def wrong_with(environment: Any) -> str | None:
    """Why the object is not an `Environment`, in words; None if it is one."""
    for name, arguments in {"messages": ("problem",), "reward": ("problem", "answer")}.items():
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


def _wrong_with_conversation(found: Any) -> str | None:
    """Why the value is not a conversation, in words; None if it is one."""
    if not isinstance(found, list | tuple):
        return f"returned {shortened(found)}, of type {type(found).__name__}"
    if not found:
        return "returned an empty list"
    for i, message in enumerate(found):
        if not isinstance(message, Mapping):
            return f"message {i} is {shortened(message)}, of type {type(message).__name__}"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f"message {i} has no role: {shortened(message)}"
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"message {i} has no content that is text: {shortened(message)}"
    return None
