"""Environments in processes of their own, with an interpreter and packages of their own."""

import asyncio
import inspect
import itertools
import json
import os
import shutil
import sys
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cairn.orchestrator.environments.calls import MAX_TURNS
from cairn.orchestrator.environments.program import Model
from cairn.orchestrator.environments.protocol import EnvironmentFailed, Rewards
from cairn.orchestrator.environments.worker.worker import decoded, encoded
from cairn.orchestrator.environments.worker_process import WorkerProcess, Workers


class SubprocessEnvironment:
    """An environment in other processes, which end when nothing refers to it any more, or with this one."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self.identity: str | None = workers.about["identity"]
        weakref.finalize(self, workers.close)

    def __len__(self) -> int:
        return self._workers.about["problems"]

    async def _call(self, method: str, *arguments: object) -> Any:
        """What a method of the environment returned, in any of the processes."""
        process = await self._workers.any()
        return await process.ask({"type": "call", "method": method, "arguments": arguments})


class SubprocessQuestions(SubprocessEnvironment):
    """One with `messages`."""

    async def messages(self, problem: int) -> Any:
        """The conversation that asks problem number `problem`."""
        return (await self._call("messages", problem))["value"]


class SubprocessGroups(SubprocessQuestions):
    """One with `messages` and `rewards`.

    Args:
        calls_at_once: number of calls that all processes together work on at the same time.
    """

    def __init__(self, workers: Workers, calls_at_once: int):
        super().__init__(workers)
        self.calls_at_once = calls_at_once

    async def rewards(self, problem: int, answers: Sequence[str]) -> Any:
        """How good each of the answers is."""
        found = await self._call("rewards", problem, answers)
        return [reward_of(one) for one in found["each"]] if "each" in found else found["value"]


class SubprocessSingleTurn(SubprocessQuestions):
    """One with `messages` and `reward`.

    Args:
        calls_at_once: number of calls that all processes together work on at the same time.
    """

    def __init__(self, workers: Workers, calls_at_once: int):
        super().__init__(workers)
        self.calls_at_once = calls_at_once

    async def reward(self, problem: int, answer: str) -> Any:
        """How good `answer` is."""
        return reward_of(await self._call("reward", problem, answer))


class SubprocessProgram(SubprocessEnvironment):
    """One with `rollout`: what its program asks of the model goes through the ledger of this process."""

    async def rollout(self, problem: int, model: Model) -> Any:
        """Work on a problem in a process; if that dies, the next try is answered from the ledger."""
        process = await self._workers.any()
        asking = _Asking(process, model)
        try:
            message = {"type": "rollout", "problem": problem, "seed": model.seed}
            return reward_of(await process.ask(message, asking.begin))
        finally:
            asking.end()


class _Asking:
    """Answers what one rollout asks, in the order in which it asks."""

    def __init__(self, process: WorkerProcess, model: Model):
        self._process, self._model = process, model
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: dict[int, asyncio.Future[Any]] = {}
        """What calls of `once` that the process makes come to, by the number of the call."""
        self._recorders: dict[int, int] = {}
        self._snapshots: dict[int, Any] = {}
        """What was sent together with these results."""

    def end(self) -> None:
        """Answer nothing more."""
        for task in self._tasks:
            task.cancel()

    def begin(self, message: dict[str, Any]) -> None:
        """Take a message of the rollout's."""
        kind = message["type"]
        if kind == "record":
            self._recorders[message["once"]] = message["call"]
            self._snapshots[message["once"]] = message["snapshot"]
            self._results[message["once"]].set_result(message["result"])
        elif kind == "failed":
            self._results[message["once"]].set_exception(_Failed(message["error"]))
        else:
            work = {
                "generate": self._generate,
                "count_tokens": self._count_tokens,
                "once": self._once,
                "each_time": self._each_time,
                "snapshot": self._snapshot,
            }[kind]
            task = asyncio.create_task(work(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate(self, message: dict[str, Any]) -> None:
        try:
            reply = await self._model.generate(
                message["messages"],
                tools=message["tools"],
                max_tokens=message["max_tokens"],
                stop_token_ids=message["stop_token_ids"],
                stop=message["stop"],
            )
        except Exception as error:
            self._say(message["call"], error=error)
        else:
            self._say(message["call"], asdict(reply))

    async def _count_tokens(self, message: dict[str, Any]) -> None:
        try:
            count = await self._model.count_tokens(message["messages"], tools=message["tools"])
        except Exception as error:
            self._say(message["call"], error=error)
        else:
            self._say(message["call"], count)

    async def _once(self, message: dict[str, Any]) -> None:
        number: int = message["call"]

        async def call() -> Any:
            self._results[number] = asyncio.get_running_loop().create_future()
            self._say(number, {"known": False, "once": number})
            return await self._results[number]

        async def snapshot() -> Any:
            return decoded(self._snapshots.pop(number))

        try:
            found = await self._model.once(
                message["name"], call, snapshot=snapshot if message["snapshot"] else None
            )
        except _Failed:
            pass  # the rollout has the exception already
        except Exception as error:
            self._say(self._recorders.get(number, number), error=error)
        else:
            known = number not in self._results
            self._say(self._recorders.get(number, number), {"known": known, "result": found})

    async def _each_time(self, message: dict[str, Any]) -> None:
        async def done() -> None:
            """Nothing: the process has called it."""

        self._say(message["call"], await self._model.each_time(done))

    async def _snapshot(self, message: dict[str, Any]) -> None:
        found = await self._model.snapshot()
        self._say(message["call"], found and {"after": found.after, "value": encoded(found.value)})

    def _say(self, call: int, result: Any = None, error: Exception | None = None) -> None:
        said = {"result": result} if error is None else {"error": str(error), "kind": type(error).__name__}
        self._process.send({"type": "answer", "number": -1, "call": call, **said})


class _Failed(Exception):
    """A call of `once` raised in the process."""


def reward_of(result: Mapping[str, Any]) -> Any:
    """A reward, as the process has sent it."""
    return result["value"] if result["weights"] is None else Rewards(result["value"], result["weights"])


# Environments with tools and with worlds in processes of their own.


TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "Any": Any,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "set": set,
}
"""Types of tools' arguments, by the names that a process gives them."""
LEFT_OUT = object()
"""The default of an argument, which only the process knows."""


class SubprocessTools(SubprocessQuestions):
    """One with `tools`, `messages` and `reward`."""

    def __init__(self, workers: Workers):
        super().__init__(workers)
        self.max_turns: int = workers.about.get("max_turns", MAX_TURNS)
        self.tools = [self._tool(**about) for about in workers.about["tools"]]

    async def reward(self, problem: int, answer: str, messages: Sequence[Mapping[str, Any]]) -> Any:
        """How good a rollout is."""
        further = [messages] if self._workers.about["rewards_messages"] else []
        return reward_of(await self._call("reward", problem, answer, *further))

    def _tool(self, name: str, doc: str, arguments: Sequence[Mapping[str, Any]]) -> Callable[..., Any]:
        """A coroutine function with the signature and docstring of a tool, which the process calls."""
        hints = {one["name"]: _type(one["type"]) for one in arguments}
        signature = inspect.Signature(
            [
                inspect.Parameter(
                    one["name"],
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if one["needed"] else LEFT_OUT,
                    annotation=hints[one["name"]],
                )
                for one in arguments
            ]
        )

        async def tool(**given: Any) -> str:
            process = await self._workers.any()
            sent = {key: value for key, value in given.items() if value is not LEFT_OUT}
            found = await process.ask({"type": "tool", "name": name, "arguments": sent})
            if "error" in found:
                raise type(found["kind"], (Exception,), {})(found["error"])
            return found["value"]

        tool.__name__ = tool.__qualname__ = name
        tool.__doc__, tool.__annotations__ = doc, hints
        tool.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return tool


def _type(described: str | Sequence[Any]) -> Any:
    """The type that a process has described (`worker.type_of`)."""
    if isinstance(described, str):
        return TYPES[described]
    name, *arguments = described
    if name == "Literal":
        return typing.Literal[tuple(arguments)]
    if name == "Union":
        return typing.Union[tuple(map(_type, arguments))]  # noqa: UP007
    return TYPES[name][tuple(map(_type, arguments))] if arguments else TYPES[name]


@dataclass(frozen=True)
class World:
    """A world in a process, and its number there."""

    process: WorkerProcess
    number: int

    async def do(self, what: str, *arguments: object) -> Any:
        """Have the process call a method for this world."""
        message = {"type": "world", "do": what, "world": self.number, "arguments": arguments}
        return await self.process.ask(message)


class SubprocessWorld(SubprocessEnvironment):
    """One with `start` and `step`; of the optional methods it has those that it has in the process."""

    _numbers = itertools.count()

    def __init__(self, workers: Workers):
        super().__init__(workers)
        self.max_turns: int = workers.about.get("max_turns", MAX_TURNS)
        own = {"messages": self._messages, "snapshot": self._snapshot, "restore": self._restore}
        for name in workers.about["methods"]:
            setattr(self, name, own[name])

    async def start(self, problem: int, seed: int) -> tuple[World, Any]:
        """A world, in one of the processes, and the first observation."""
        world = World(await self._workers.any(), next(self._numbers))
        return world, await world.do("start", problem, seed)

    async def step(self, world: World, answer: str) -> tuple[Any, Any, Any]:
        """Act in the world."""
        observation, reward, done = await world.do("step", answer)
        return observation, reward_of(reward), done

    async def close(self, world: World) -> None:
        """Close a world, unless its process has ended."""
        if not world.process.dead:
            await world.do("close")

    async def _messages(self, problem: int) -> Any:
        return (await self._call("messages", problem))["value"]

    async def _snapshot(self, world: World) -> Any:
        return decoded(await world.do("snapshot"))

    async def _restore(self, problem: int, seed: int, snapshot: Any) -> World:
        world = World(await self._workers.any(), next(self._numbers))
        await world.do("restore", problem, seed, encoded(snapshot))
        return world


# Makes environments in processes of their own, of whichever kind they are there.


VERIFIERS = "verifiers==0.4.0"


def process_environment(
    environment: str,
    *,
    args: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    python: str | None = None,
    processes: int = 1,
    at_once: int = 1,
    start_timeout: float = 600.0,
) -> SubprocessEnvironment:
    """An environment in processes of its own.

    Args:
        environment: module:Class, imported in the process; it has `messages` and `reward`, with `tools` or
            without, or `messages` and `rewards`, or `start` and `step`, or `rollout`.
        args: arguments of its constructor.
        packages: what uv installs for the process, as pip names it, such as "verifiers==0.4.0". The
            environment is uv's, kept in its cache; this interpreter's packages are not in it.
        python: the interpreter, such as that of a virtual environment; with packages, also a version such as
            "3.12". Without packages and python, it is this one.
        processes: number of processes, which share the work.
        at_once: calls that a process works on at the same time; above 1, the methods must be thread-safe.
        start_timeout: seconds until a process must have made the environment, installing included.

    Raises:
        ValueError: an argument is wrong, or the environment can't be made.
    """
    for name, value in {"processes": processes, "at_once": at_once}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: it must be at least 1")
    if isinstance(packages, str):
        raise ValueError(f'packages is a list, such as ["{packages}"]')
    first = {"name": environment, "args": dict(args or {}), "threads": at_once}
    try:
        json.dumps(first)
        workers = Workers(_command(packages, python), first, processes, start_timeout)
    except TypeError as error:
        raise ValueError(f"the environment's args must be JSON: {error}") from error
    except EnvironmentFailed as error:
        raise ValueError(f"{environment} can't be made in its own process: {error}") from error
    if workers.about["kind"] == "single_turn":
        return SubprocessSingleTurn(workers, processes * at_once)
    if workers.about["kind"] == "groups":
        return SubprocessGroups(workers, processes * at_once)
    return KINDS[workers.about["kind"]](workers)


KINDS: dict[str, type[SubprocessEnvironment]] = {
    "program": SubprocessProgram,
    "tools": SubprocessTools,
    "world": SubprocessWorld,
}


def _command(packages: Sequence[str], python: str | None) -> list[str]:
    """What starts an interpreter with the packages.

    Raises:
        ValueError: uv or the interpreter is missing.
    """
    if not packages:
        found = sys.executable if python is None else shutil.which(python)
        if found is None:
            raise ValueError(f"python = {python!r}: there is no such program")
        return [found]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ValueError(
            "packages needs uv, which is not on the PATH (scripts/setup installs it); or make a virtual "
            "environment with the packages and name its interpreter with python"
        )
    wanted = [option for package in packages for option in ("--with", package)]
    chosen = ["--python", python or f"{sys.version_info.major}.{sys.version_info.minor}"]
    return [uv, "run", "--quiet", "--isolated", "--no-project", *chosen, *wanted, "python"]


def verifiers(
    taskset: str,
    *,
    config: Mapping[str, Any] | None = None,
    problems: int | None = None,
    packages: Sequence[str] = (),
    version: str = VERIFIERS,
    **process: Any,
) -> SubprocessEnvironment:
    """The tasks of a taskset for verifiers (v1), whose model calls are the orchestrator's.

    Each task is a problem: one question, one answer, which the task's rewards, metrics and judges score.

    Args:
        taskset: its id, which is the name of the module or package that has it.
        config: the taskset's settings.
        problems: use only the first so many tasks; needed where the taskset never ends.
        packages: what has the taskset, as pip names it.
        version: verifiers itself; "" if `python` names an interpreter that has it.
        process: further arguments of `process_environment`: python, processes, at_once, start_timeout.

    Raises:
        ValueError: an argument is wrong, or the tasks need more than this (a runtime, tools).
    """
    wanted = [*([version] if version else []), *packages]
    args = {"taskset": taskset, "config": dict(config or {}), "problems": problems}
    return process_environment("verifiers_v1:Tasks", args=args, packages=wanted, **process)
