"""Calls the user's methods off the event loop and within a deadline."""

import asyncio
import inspect
import logging
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.protocol import EnvironmentFailed, hint, passes, place_of
from cairn.orchestrator.environments.times import CallTimes
from cairn.run import noted_calls
from cairn.run.output import LOGGED_AGAIN, quoted

logger = logging.getLogger(__name__)

SHOWN = 300
"""Characters of an answer to quote in an error message."""
LONGEST_TRACE = 16_000
"""Characters of a traceback in the log."""
MOST_KINDS = 1000
"""Kinds of exceptions that are counted separately; one of a further kind is logged in one line."""


Job = tuple[Callable[[], Any], Future[Any], int | None]
"""What to call, its result, and the call in progress that it is part of (`noted_calls.current`)."""


def _nothing() -> None:
    pass


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
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._started = 0
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._afterwards = set[asyncio.Task[None]]()
        self._closed = False
        self._raised_at = Counter[str]()
        """How often each exception was raised: by its type and the place in the code."""

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

    async def call(
        self,
        method: Callable[..., Any],
        what: str,
        *arguments: object,
        about: str = "",
        begins: Callable[[], None] = _nothing,
    ) -> Any:
        """The result of `method`, awaited if it is a coroutine.

        Args:
            begins: called once a thread is free for it.

        Raises:
            EnvironmentFailed: the method raised, or took longer than `timeout`.
        """
        try:
            async with self.free:  # wait for a thread before the deadline starts
                begins()
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
        self.log_exception(f"{self.whose}: {what}", error)
        return failed(f"{self.whose}: {what}", error, about)

    def log_exception(self, whose: str, error: BaseException) -> None:
        """Log an exception of the user's code: with its traceback the first time, then how often it came."""
        kind = f"{type(error).__name__} at {place_of(error)}"
        if kind not in self._raised_at and len(self._raised_at) >= MOST_KINDS:
            logger.error("%s raised %s: %s", whose, kind, quoted(error, SHOWN))
            return
        self._raised_at[kind] += 1
        count = self._raised_at[kind]
        if count == 1:
            trace = quoted("".join(traceback.format_exception(error)), LONGEST_TRACE)
            logger.error("%s raised (further ones of the kind are only counted)\n%s", whose, trace)
        elif count in LOGGED_AGAIN:
            logger.error("%s raised %s, for the %dth time", whose, kind, count)

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
        noted = noted_calls.current()
        if self._count == 0:
            _fill(future, call, noted)
            return future
        with self._starting:
            if self._started < self._count:
                self._started += 1
                name = f"environment {self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put((call, future, noted))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future, noted = job
            _fill(future, call, noted)
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
                self._loop.set_task_factory(_noted_task)
                self._loop.set_default_executor(_NotedThreads(thread_name_prefix="environment's own"))
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

    async def call(
        self,
        method: Callable[..., Any],
        what: str,
        *arguments: object,
        about: str = "",
        begins: Callable[[], None] = _nothing,
    ) -> Any:
        async with self.free:
            begins()
            try:
                async with asyncio.timeout(self.timeout):
                    return await method(*arguments)
            except TimeoutError:
                raise self._too_late(what, about) from None
            except EnvironmentFailed as error:
                raise EnvironmentFailed(
                    f"{self.whose}: {what}: {error}{about}", passing=error.passing
                ) from error


class Raised(Exception):
    """Wraps an environment's exception: asyncio would act on a bare SystemExit or StopIteration."""

    def __init__(self, error: BaseException):
        self.error = error


def _fill(future: "Future[Any]", call: Callable[[], Any], noted: int | None) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(_outcome(call, noted))
        except Raised as raised:
            future.set_exception(raised)


def _outcome(call: Callable[[], Any], noted: int | None) -> Any:
    try:
        with noted_calls.executing(noted):
            return call()
    except BaseException as error:
        raise Raised(error) from error


class _Noted(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps is noted as code of the call in progress; for a task."""

    def __init__(self, coroutine: Any, noted: int):
        self._coroutine, self._noted = coroutine, noted

    def send(self, value: Any) -> Any:
        with noted_calls.executing(self._noted):
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with noted_calls.executing(self._noted):
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def _noted_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **context: Any) -> "asyncio.Task[Any]":
    """A task, as the environment's event loop makes it."""
    noted = noted_calls.current()
    return asyncio.Task(coroutine if noted is None else _Noted(coroutine, noted), loop=loop, **context)


class _NotedThreads(ThreadPoolExecutor):
    """The threads of the environment's event loop (`asyncio.to_thread`)."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        noted = noted_calls.current()

        def call() -> Any:
            with noted_calls.executing(noted):
                return fn(*args, **kwargs)

        return super().submit(call)


def failed(whose: str, error: BaseException, about: str = "") -> EnvironmentFailed:
    """What an exception of the user's code means: a failure, which says whether another try may help."""
    what = f"{whose} raised {type(error).__name__}: {quoted(error)}{hint(error)}{about}"
    return EnvironmentFailed(what, passing=passes(error))


def shortened(value: object) -> str:
    """The repr of `value`; the middle of a long one is cut out."""
    try:
        text = repr(value)
    except Exception as error:  # of the user's own class
        text = f"(a {type(value).__name__} without a repr: {type(error).__name__})"
    return text if len(text) <= SHOWN else f"{text[: SHOWN * 2 // 3]} ... {text[-SHOWN // 3 :]}"


# Environments as the orchestrator asks them: off the event loop, within deadlines, with answers checked.


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
