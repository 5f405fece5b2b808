"""Single-turn environments as the orchestrator uses them: one conversation, one answer, one reward."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import (
    AskedEnvironment,
    AwaitedCalls,
    shortened,
    wrong_with_methods,
)
from cairn.orchestrator.environments.protocol import (
    ANSWER,
    EnvironmentFailed,
    Reward,
    Rewards,
    Unscored,
    in_parts,
    says_nothing,
)


class SingleTurn(AskedEnvironment):
    """Asks an environment for conversations and rewards, and checks what it returns.

    A call's deadline begins when a thread is free for it; in an environment that has processes of its own
    (`calls_at_once`), when one of these works on it.
    """

    def __init__(self, environment: Any, config: OrchestratorConfig):
        super().__init__(environment, config)
        if at_once := getattr(environment, "calls_at_once", None):
            self.calls = AwaitedCalls(self.calls.whose, at_once, config.reward_timeout)

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        methods = {"messages": ("problem",), "reward": ("problem", "answer")}
        return wrong_with_methods(environment, methods)

    async def shown(self, problem: int) -> list[Mapping[str, Any]]:
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


# Environments that compare the answers to a problem: one call rewards all of them.


class GroupEnvironment(Protocol):
    """A fixed set of problems; the answers to each are rewarded together, once all of them are there.

    For judges that rank answers, and rewards relative to the best or the shortest one. As `Environment`
    otherwise, with `rewards` in the place of `reward`; where both are there, `rewards` is called.
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def messages(self, problem: int) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """The conversation that asks problem number `problem`."""
        ...

    def rewards(
        self, problem: int, answers: Sequence[str]
    ) -> Sequence[Reward | None] | Awaitable[Sequence[Reward | None]]:
        """How good each of the answers is, in their order: of each what `Environment.reward` returns.

        None: there is nothing to say of that answer, which is then not trained on. Answers without a text,
        because sampling them failed, are not among `answers`, so there may be fewer than
        `samples_per_prompt`.
        """
        ...


class GroupRewarded(SingleTurn):
    """Asks an environment for conversations and for the rewards of a group, and checks what it returns."""

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        return wrong_with_methods(environment, {"messages": ("problem",), "rewards": ("problem", "answers")})

    async def rewards(
        self, problem: int, answers: Sequence[str]
    ) -> list[tuple[float, dict[str, float]] | None]:
        """For each answer its reward, with its parts by name if the environment returned parts, or None.

        Raises:
            EnvironmentFailed: the environment raised, timed out, or returned something else.
        """
        what = f"rewards of problem {problem}"
        with self.times.call() as begins:
            found = await self.calls.call(
                self.environment.rewards, what, problem, list(answers), begins=begins
            )
        if callable(as_list := getattr(found, "tolist", None)):  # numpy, torch
            found = as_list()
        whose = f"environment {self.name!r}: {what} must be a list with one reward for each of"
        if not isinstance(found, list | tuple) or len(found) != len(answers):
            there = f"{len(found)} of them" if isinstance(found, list | tuple) else shortened(found)
            raise EnvironmentFailed(f"{whose} the {len(answers)} answers, and is {there}")
        checked = [None if says_nothing(one) else in_parts(one) for one in found]
        for number, (one, reward) in enumerate(zip(found, checked, strict=True)):
            if isinstance(reward, str):
                raise EnvironmentFailed(
                    f"{whose} the answers: a finite number, named parts, or None. Of answer {number} it is "
                    f"{shortened(one)}, of type {type(one).__name__}: {reward}; the answer was "
                    f"{shortened(answers[number])}"
                )
        return [None if isinstance(one, str) else one for one in checked]
