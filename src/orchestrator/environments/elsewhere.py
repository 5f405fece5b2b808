"""Environments in processes of their own, with an interpreter and packages of their own."""

import asyncio
import json
import os
import shutil
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import AwaitedCalls
from cairn.orchestrator.environments.program import Model
from cairn.orchestrator.environments.protocol import EnvironmentFailed
from cairn.orchestrator.environments.rewards import Rewards
from cairn.orchestrator.environments.single_turn import SingleTurn
from cairn.orchestrator.environments.worker_process import WorkerProcess, Workers

VERIFIERS = "verifiers==0.4.0"


class Elsewhere:
    """An environment in other processes, which end when nothing refers to it any more, or with this one."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self.identity: str | None = workers.about["identity"]
        weakref.finalize(self, workers.close)

    def __len__(self) -> int:
        return self._workers.about["problems"]


class SingleTurnElsewhere(Elsewhere):
    """One with `messages` and `reward`.

    Args:
        at_once: number of calls that all processes together work on at the same time.
    """

    def __init__(self, workers: Workers, at_once: int):
        super().__init__(workers)
        self.at_once = at_once

    async def messages(self, problem: int) -> Any:
        """The conversation that asks problem number `problem`."""
        return (await self._call("messages", problem))["value"]

    async def reward(self, problem: int, answer: str) -> Any:
        """How good `answer` is."""
        return _reward(await self._call("reward", problem, answer))

    async def _call(self, method: str, *arguments: object) -> Any:
        process = await self._workers.any()
        return await process.ask({"type": "call", "method": method, "arguments": arguments})


class AskedElsewhere(SingleTurn):
    """Asks an environment in processes of its own: a call's deadline begins when a process works on it."""

    def __init__(self, environment: SingleTurnElsewhere, config: OrchestratorConfig):
        super().__init__(environment, config)
        self.calls.close()
        self.calls = AwaitedCalls(self.calls.whose, environment.at_once, config.reward_timeout)


class ProgramElsewhere(Elsewhere):
    """One with `rollout`: what its program asks of the model goes through the ledger of this process."""

    async def rollout(self, problem: int, model: Model) -> Any:
        """Work on a problem in a process; if that dies, the next try is answered from the ledger."""
        process = await self._workers.any()
        asking = _Asking(process, model)
        try:
            message = {"type": "rollout", "problem": problem, "seed": model.seed}
            return _reward(await process.ask(message, asking.begin))
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

    def end(self) -> None:
        """Answer nothing more."""
        for task in self._tasks:
            task.cancel()

    def begin(self, message: dict[str, Any]) -> None:
        """Take a message of the rollout's."""
        kind = message["type"]
        if kind == "record":
            self._recorders[message["once"]] = message["call"]
            self._results[message["once"]].set_result(message["result"])
        elif kind == "failed":
            self._results[message["once"]].set_exception(_Failed(message["error"]))
        else:
            task = asyncio.create_task(self._generate(message) if kind == "generate" else self._once(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate(self, message: dict[str, Any]) -> None:
        try:
            reply = await self._model.generate(
                message["messages"],
                tools=message["tools"],
                max_tokens=message["max_tokens"],
                stop_token_ids=message["stop_token_ids"],
            )
        except Exception as error:
            self._say(message["call"], error=error)
        else:
            self._say(message["call"], asdict(reply))

    async def _once(self, message: dict[str, Any]) -> None:
        number: int = message["call"]

        async def call() -> Any:
            self._results[number] = asyncio.get_running_loop().create_future()
            self._say(number, {"known": False, "once": number})
            return await self._results[number]

        try:
            found = await self._model.once(message["name"], call)
        except _Failed:
            pass  # the rollout has the exception already
        except Exception as error:
            self._say(self._recorders.get(number, number), error=error)
        else:
            known = number not in self._results
            self._say(self._recorders.get(number, number), {"known": known, "result": found})

    def _say(self, call: int, result: Any = None, error: Exception | None = None) -> None:
        said = {"result": result} if error is None else {"error": str(error), "kind": type(error).__name__}
        self._process.send({"type": "answer", "number": -1, "call": call, **said})


class _Failed(Exception):
    """A call of `once` raised in the process."""


def _reward(result: Mapping[str, Any]) -> Any:
    return result["value"] if result["weights"] is None else Rewards(result["value"], result["weights"])


def process_environment(
    environment: str,
    *,
    args: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    python: str | None = None,
    processes: int = 1,
    at_once: int = 1,
    start_timeout: float = 600.0,
) -> Elsewhere:
    """An environment in processes of its own.

    Args:
        environment: module:Class, imported in the process; it has `messages` and `reward`, or `rollout`.
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
    if workers.about["kind"] == "program":
        return ProgramElsewhere(workers)
    return SingleTurnElsewhere(workers, processes * at_once)


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
) -> Elsewhere:
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
