"""Calls the user's methods off the event loop and within a deadline."""

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from cairn.orchestrator.environments.protocol import EnvironmentFailed

logger = logging.getLogger(__name__)

SHOWN = 300
"""Characters of an answer to quote in an error message."""


class Calls:
    """Calls a user's methods without blocking the event loop.

    Methods run on up to `threads` threads at once; with 1 they need not be thread-safe. Coroutines that they
    return run concurrently on one event loop in a further thread. With 0, methods run on the caller's thread
    and block its event loop.

    Args:
        whose: prefix of every error message, such as "environment 'reverse_text'".
        timeout: seconds that a call may take.
    """

    def __init__(self, whose: str, threads: int, timeout: float):
        self.whose = whose
        self.timeout = timeout
        self._count = threads
        self.free = asyncio.Semaphore(max(1, threads))
        """Held by who calls `in_thread`."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._started = 0
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._afterwards = set[asyncio.Task[None]]()
        self._closed = False

    def close(self) -> None:
        """End the threads once their calls have returned. They are daemons: a hung call delays no exit."""
        with self._starting:
            if self._loop is None:
                self._end_threads()
            elif not self._closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._closed = True

    def _end_threads(self) -> None:
        for _ in range(self._started):
            self._jobs.put(None)

    async def call(self, method: Callable[..., Any], what: str, *arguments: object, about: str = "") -> Any:
        """The result of `method`, awaited if it is a coroutine.

        Raises:
            EnvironmentFailed: the method raised, or took longer than `timeout`.
        """
        try:
            async with self.free:  # wait for a thread before the deadline starts
                async with asyncio.timeout(self.timeout):
                    found = await self.in_thread(lambda: method(*arguments))
            if not inspect.isawaitable(found):
                return found
            async with asyncio.timeout(self.timeout):
                return await self.on_own_loop(lambda: found)
        except TimeoutError:  # our deadline; the environment's own TimeoutError is a `Raised`
            raise self._too_late(what, about) from None
        except Raised as raised:
            raise self._raised(what, raised.error, about) from raised.error

    def _too_late(self, what: str, about: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self.whose}: {what} has not returned within {self.timeout:g} s "
            f"(--orchestrator.reward-timeout allows more){about}"
        )

    def _raised(self, what: str, error: BaseException, about: str) -> EnvironmentFailed:
        logger.error("%s: %s raised", self.whose, what, exc_info=error)
        return EnvironmentFailed(f"{self.whose}: {what} raised {type(error).__name__}: {error}{about}")

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """The result of a function, which is called on a thread; at most `threads` may do so at once.

        Raises:
            Raised: it raised.
        """
        return await asyncio.wrap_future(self.submit(call))

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Have a thread call a function as soon as one is free; any thread may ask for that.

        Returns:
            Its result, or the `Raised` with its exception.
        """
        future: Future[Any] = Future()
        if self._count == 0:
            _fill(future, call)
            return future
        with self._starting:
            if self._started < self._count:
                self._started += 1
                name = f"environment {self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put((call, future))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            _fill(future, call)
            del job, call, future  # else the last answer stays referenced

    async def on_own_loop(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        """The result of what `begin` returns, which runs on the environment's own event loop.

        Raises:
            Raised: it raised.
        """

        async def outcome() -> Any:
            try:
                return await begin()
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise  # cancelled by us
                raise Raised(error) from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise Raised(error) from error

        with self._starting:  # what comes after the loop's end would never begin
            if self._closed:
                raise asyncio.CancelledError(f"{self.whose} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._run_loop, args=[self._loop], name="environment loop", daemon=True
                ).start()
            future = asyncio.run_coroutine_threadsafe(outcome(), self._loop)
        return await asyncio.wrap_future(future)

    async def blocked(self, seconds: float = 1.0) -> bool:
        """Whether the environment's own event loop stands still for so long."""
        with self._starting:
            if self._loop is None or self._closed:
                return False
            passed = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        _, waiting = await asyncio.wait({asyncio.wrap_future(passed)}, timeout=seconds)
        return bool(waiting)

    def afterwards(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine run that nobody waits for; called on the own event loop, whose end cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._afterwards.add(task)  # the event loop itself holds no task
        task.add_done_callback(self._afterwards.discard)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until it is stopped, then cancel its remaining tasks, and those that they begin.

        They may need the threads to close what is open.
        """
        loop.run_forever()
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        loop.close()
        self._end_threads()


class AwaitedCalls(Calls):
    """Calls coroutine functions that only wait for other processes, on the caller's event loop.

    Args:
        at_once: number of calls at the same time; the deadline of the others has not begun.
    """

    def __init__(self, whose: str, at_once: int, timeout: float):
        super().__init__(whose, 0, timeout)
        self.free = asyncio.Semaphore(at_once)

    async def call(self, method: Callable[..., Any], what: str, *arguments: object, about: str = "") -> Any:
        """As in `Calls`."""
        async with self.free:
            try:
                async with asyncio.timeout(self.timeout):
                    return await method(*arguments)
            except TimeoutError:
                raise self._too_late(what, about) from None
            except EnvironmentFailed as failed:
                raise EnvironmentFailed(f"{self.whose}: {what}: {failed}{about}") from failed


class Raised(Exception):
    """Wraps an environment's exception: asyncio would act on a bare SystemExit or StopIteration."""

    def __init__(self, error: BaseException):
        self.error = error


def _fill(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(_outcome(call))
        except Raised as raised:
            future.set_exception(raised)


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        raise Raised(error) from error


def shortened(value: object) -> str:
    """The repr of `value`; the middle of a long one is cut out."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} ... {text[-SHOWN // 3 :]}"
