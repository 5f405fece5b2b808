"""Calls of an environment: off the event loop, within a deadline, and with what comes back checked.

Nothing else calls an environment's methods.
"""

import asyncio
import functools
import inspect
import logging
import math
import numbers
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Self

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import BadEnvironment, Environment, make_environment
from cairn.run.errors import CairnError
from cairn.run.waiting import run_async

logger = logging.getLogger(__name__)

LARGEST_REWARD = 1e37
"""Advantages are float32, which ends soon after."""
SHOWN = 300
"""Characters of an answer that are shown in a message."""


class EnvironmentFailed(CairnError):
    """An environment raised, took too long, or returned what is no conversation or no reward.

    The message names the environment, the problem, for a reward the answer, and what happened.
    """


class EnvironmentCalls:
    """Asks an environment for conversations and rewards, without holding up the event loop.

    Its methods run on `reward_threads` threads, so that as many calls run at once: one by default, for
    environments that can't be called from several threads. What is awaitable of their results is awaited on
    an event loop in one more thread, all of it at once. With 0 threads its methods run on the caller's
    thread, and hold up everything. Use as a context manager, or `close` it; a call that never returns does
    not keep the process from ending.
    """

    def __init__(self, environment: Environment, config: OrchestratorConfig):
        self.environment = environment
        self.name = config.environment.name
        self.timeout = config.reward_timeout
        self._count = config.reward_threads
        self._free = asyncio.Semaphore(max(1, self._count))
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._started = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, once what they are at has returned."""
        for _ in range(self._started):
            self._jobs.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def messages(self, problem: int) -> list[Mapping[str, Any]]:
        """The conversation that asks problem number `problem`.

        Raises:
            EnvironmentFailed: there is none.
        """
        found = await self._call(self.environment.messages, f"messages({problem})", problem)
        if wrong := _wrong_with_conversation(found):
            raise EnvironmentFailed(
                f"environment {self.name!r}: messages({problem}) must return a list of messages such as "
                f'[{{"role": "user", "content": "..."}}], and {wrong}'
            )
        return list(found)

    async def reward(self, problem: int, answer: str) -> float:
        """How good `answer` is; a finite number.

        Raises:
            EnvironmentFailed: the environment doesn't say.
        """
        what = f"reward of problem {problem}"
        about = f"; the answer was {_shortened(answer)}"
        found = await self._call(self.environment.reward, what, problem, answer, about=about)
        reward = to_reward(found)
        if reward is None:
            hint = " (is there a path without a `return`?)" if found is None else ""
            raise EnvironmentFailed(
                f"environment {self.name!r}: {what} must be one finite number, and is "
                f"{_shortened(found)}, of type {type(found).__name__}{hint}{about}"
            )
        return reward

    async def _call(self, method: Callable[..., Any], what: str, *arguments: object, about: str = "") -> Any:
        """What `method` returns, awaited if need be.

        Raises:
            EnvironmentFailed: it raised, or took longer than `timeout`.
        """
        try:
            async with self._free:  # so that the deadline runs from when it begins
                async with asyncio.timeout(self.timeout):
                    found = await self._in_thread(lambda: method(*arguments))
            if inspect.isawaitable(found):
                async with asyncio.timeout(self.timeout):
                    found = await self._on_own_loop(found)
            return found
        except TimeoutError:  # ours: the environment's own is a `_Raised`
            raise EnvironmentFailed(
                f"environment {self.name!r}: {what} has not returned within {self.timeout:g} s "
                f"(--orchestrator.reward-timeout allows more){about}"
            ) from None
        except _Raised as raised:
            raise self._raised(what, raised.error, about) from raised.error

    def _raised(self, what: str, error: BaseException, about: str) -> EnvironmentFailed:
        logger.error("environment %r: %s raised", self.name, what, exc_info=error)
        return EnvironmentFailed(
            f"environment {self.name!r}: {what} raised {type(error).__name__}: {error}{about}"
        )

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        if self._count == 0:
            return _outcome(call)
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._work, name=f"environment {self._started}", daemon=True).start()
        future: Future = Future()
        self._jobs.put((call, future))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(_outcome(call))
                except _Raised as raised:
                    future.set_exception(raised)
            del job, call, future  # or the last answer stays in memory

    async def _on_own_loop(self, awaitable: Awaitable[Any]) -> Any:
        async def outcome() -> Any:
            try:
                return await awaitable
            except asyncio.CancelledError as error:
                if asyncio.current_task().cancelling():
                    raise  # we cancelled it
                raise _Raised(error) from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise _Raised(error) from error

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            run = functools.partial(_run_loop, self._loop)
            threading.Thread(target=run, name="environment loop", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(outcome(), self._loop))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run it until it is stopped, and end what is left on it."""
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


class _Raised(Exception):
    """Carries what an environment raised, be it SystemExit or StopIteration, past those who act on it."""

    def __init__(self, error: BaseException):
        self.error = error


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        raise _Raised(error) from error


def to_reward(value: Any) -> float | None:
    """`value` as a finite float; None if it is no number, or not one.

    A number may be Python's, or a scalar or an array or tensor of one element of numpy or torch.
    """
    if callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # several elements
            return None
    if not isinstance(value, numbers.Real):
        return None
    try:
        reward = float(value)
    except OverflowError:
        return None
    return reward if math.isfinite(reward) and abs(reward) <= LARGEST_REWARD else None


def check_environment(config: OrchestratorConfig) -> Environment:
    """Find what is wrong with an environment before anything is started: make it, and ask for problem 0.

    Returns:
        The environment.

    Raises:
        BadEnvironment: it can't be made, lacks something, or problem 0 is no conversation.
    """
    environment = make_environment(config.environment)

    async def ask() -> None:
        with EnvironmentCalls(environment, config) as calls:
            await calls.messages(0)

    try:
        run_async(ask())
    except EnvironmentFailed as error:
        raise BadEnvironment(f"orchestrator.environment: {error}") from None
    return environment


def _wrong_with_conversation(found: Any) -> str | None:
    """What keeps this from being a conversation, in words; None if nothing does."""
    if not isinstance(found, list | tuple):
        return f"returned {_shortened(found)}, of type {type(found).__name__}"
    if not found:
        return "returned an empty one"
    for i, message in enumerate(found):
        if not isinstance(message, Mapping):
            return f"message {i} is {_shortened(message)}, of type {type(message).__name__}"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f"message {i} has no role: {_shortened(message)}"
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"message {i} has no content that is text: {_shortened(message)}"
    return None


def _shortened(value: object) -> str:
    """Its repr, without the middle if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} ... {text[-SHOWN // 3 :]}"
