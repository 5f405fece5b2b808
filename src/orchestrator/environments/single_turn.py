"""Single-turn environments as the orchestrator uses them: one conversation, one answer, one reward."""

from collections.abc import Mapping
from typing import Any

from cairn.orchestrator.environments.asked import AskedEnvironment, wrong_with_methods
from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.protocol import EnvironmentFailed, Unscored
from cairn.orchestrator.environments.rewards import Rewards, in_parts, says_nothing
from cairn.orchestrator.failures import ANSWER


class SingleTurn(AskedEnvironment):
    """Asks an environment for conversations and rewards, and checks what it returns."""

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        """It has `messages` and `reward`."""
        methods = {"messages": ("problem",), "reward": ("problem", "answer")}
        return wrong_with_methods(environment, methods)

    async def shown(self, problem: int) -> list[Mapping[str, Any]]:
        """Its conversation."""
        return await self.messages(problem)

    async def messages(self, problem: int) -> list[Mapping[str, Any]]:
        """The conversation that asks problem number `problem`.

        Raises:
            EnvironmentFailed: the environment raised, timed out, or returned something else.
        """
        return await messages_of(self, problem)

    async def reward(self, problem: int, answer: str) -> tuple[float, dict[str, float]]:
        """How good `answer` is: a finite number, and its parts by name if the environment returned parts.

        Raises:
            EnvironmentFailed: the environment raised, timed out, or returned something else.
        """
        what = f"reward of problem {problem}"
        about = f"{ANSWER}{shortened(answer)}"
        with self.times.call() as begins:
            found = await self.calls.call(
                self.environment.reward, what, problem, answer, about=about, begins=begins
            )
        if says_nothing(found):
            raise Unscored(
                f"environment {self.name!r}: {what} returned None, which means that it has nothing to say of "
                f"the answer (or there is a path without a `return`){about}"
            )
        reward = in_parts(found)
        if isinstance(reward, str):
            why = f": {reward}" if isinstance(found, Mapping | Rewards) else ""
            raise EnvironmentFailed(
                f"environment {self.name!r}: {what} must be one finite number, or named parts, and is "
                f"{shortened(found)}, of type {type(found).__name__}{why}{about}"
            )
        return reward


async def messages_of(asked: AskedEnvironment, problem: int) -> list[Mapping[str, Any]]:
    """The conversation that asks problem number `problem` of an environment with `messages`.

    Raises:
        EnvironmentFailed: the environment raised, timed out, or returned something else.
    """
    found = await asked.calls.call(asked.environment.messages, f"messages({problem})", problem)
    if wrong := wrong_with_conversation(found):
        raise EnvironmentFailed(
            f"environment {asked.name!r}: messages({problem}) must return a list of messages such as "
            f'[{{"role": "user", "content": "..."}}], and {wrong}'
        )
    return list(found)


def wrong_with_conversation(found: Any) -> str | None:
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
