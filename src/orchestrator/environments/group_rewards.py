"""Environments that compare the answers to a problem: one call rewards all of them."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from cairn.orchestrator.environments.asked import wrong_with_methods
from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.protocol import EnvironmentFailed, Reward
from cairn.orchestrator.environments.rewards import in_parts, says_nothing
from cairn.orchestrator.environments.single_turn import SingleTurn


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
        """It has `messages` and `rewards`."""
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
