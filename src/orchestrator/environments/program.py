"""Environments whose rollouts are programs: they ask the model as often as they like, and the world."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from cairn.endpoint import ChatModel
from cairn.orchestrator.environments.calls import AskedEnvironment, wrong_with_methods
from cairn.orchestrator.environments.protocol import Rewards
from cairn.run.errors import UsageError

LARGEST_SNAPSHOT = 2**18
"""Bytes of a snapshot: thousands of them may lie in the ledger, which every checkpoint has a copy of."""


@dataclass(frozen=True)
class Snapshot:
    """A state of the world that a rollout works in.

    after: name of the call (`Model.once`) that it was recorded with. value: JSON or bytes, as it was given.
    """

    after: str
    value: Any


class Model(ChatModel, Protocol):
    """What a rollout asks. All answers are in the ledger before the rollout goes on."""

    async def once(
        self, name: str, call: Callable[[], Any], *, snapshot: Callable[[], Any] | None = None
    ) -> Any:
        """The result of `call()`, which is called once however often the rollout is started again.

        Args:
            name: of the call, by which it is recognised.
            call: a function or coroutine function; functions run on the environment's threads.
            snapshot: of the same kind; called after `call`, it returns the state of the rollout's world, as
                JSON or bytes, of at most `LARGEST_SNAPSHOT` bytes. That is recorded together with the result
                and replaces the rollout's earlier snapshot.

        Returns:
            The result, which must be JSON, as it is after being written and read.
        """
        ...

    async def each_time(self, call: Callable[[], Any]) -> Any:
        """The result of `call()`, which is not recorded: it is called whenever the rollout comes there.

        Its kind and its deadline are as with `once`.
        """
        ...

    async def skip_to(self, name: str) -> Any:
        """What the call `name` came to, if it is recorded; the rollout goes on behind it, else None.

        For what needs nothing of the calls before it any more; the model can't be asked afterwards. Only the
        first call of a rollout can skip.
        """
        ...

    def pause(self) -> Callable[[], None]:
        """Have the rollout's time stand still, while it waits for a free thread.

        Returns:
            What lets it go on; any thread may call it, once.
        """
        ...

    async def snapshot(self) -> Snapshot | None:
        """The rollout's newest snapshot; None if it has none, or the call that has it is still to come."""
        ...


class ProgramEnvironment(Protocol):
    """A set of problems, each worked on by a program.

    Problem i must be the same in every process and every run. A rollout that is interrupted is started from
    the top, and its calls of the model are answered from the ledger as before: with the same answers it must
    make the same calls in the same order. The optional attribute `identity` is text that must change whenever
    the problems or rewards do.
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    async def rollout(self, problem: int, model: Model) -> float | Mapping[str, float] | Rewards:
        """Work on problem number `problem`; returns the reward, a finite number or several by name."""
        ...


class Programs(AskedEnvironment):
    """Runs rollouts on the environment's own event loop."""

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        if wrong := wrong_with_methods(environment, {"rollout": ("problem", "model")}):
            return wrong
        if not inspect.iscoroutinefunction(environment.rollout):
            return "its rollout is not a coroutine: write async def rollout(self, problem, model)"
        return None

    async def shown(self, problem: int) -> Any:
        """Nothing: what a problem is shows when its program runs."""

    def start(self, problem: int, model: Model) -> Awaitable[Any]:
        """The rollout's result, once it has ended.

        Raises:
            Raised: it raised.
        """
        return self.calls.on_own_loop(functools.partial(self.environment.rollout, problem, model))

    async def over(self, problem: int, seed: int) -> None:
        """Called when a rollout is not started again: it has its reward, has failed or was dropped."""

    async def answer(self, call: Callable[[], Any], waiting: AbstractContextManager[object]) -> Any:
        """The result of a function, which is called on a thread, or of the coroutine that it returns.

        Args:
            waiting: entered while all threads are busy.

        Raises:
            Raised: it raised.
        """
        with self.times.call() as begins:
            with waiting:
                await self.calls.free.acquire()
            begins()
            try:
                found = await self.calls.in_thread(call)
            finally:
                self.calls.free.release()
            return await self.calls.on_own_loop(lambda: found) if inspect.isawaitable(found) else found


def no_tool_parser(name: str) -> UsageError:
    """What is wrong if the environment of that name gives the model tools, and nothing reads its calls."""
    return UsageError(
        f"environment {name!r} gives the model tools, but nothing reads its calls: set "
        "orchestrator.tool_parser to the parser of vLLM that fits the model, such as hermes"
    )


def on_loop(loop: asyncio.AbstractEventLoop, work: Any) -> "asyncio.Future[Any]":
    """The result of a coroutine that runs on another event loop; cancelled together with it."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
