"""Environments in processes of their own, with an interpreter and packages of their own."""

import asyncio
import base64
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import AwaitedCalls
from cairn.orchestrator.environments.group_rewards import GroupRewarded
from cairn.orchestrator.environments.program import Model
from cairn.orchestrator.environments.rewards import Rewards
from cairn.orchestrator.environments.single_turn import SingleTurn
from cairn.orchestrator.environments.worker_process import WorkerProcess, Workers


class Elsewhere:
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


class QuestionsElsewhere(Elsewhere):
    """One with `messages`."""

    async def messages(self, problem: int) -> Any:
        """The conversation that asks problem number `problem`."""
        return (await self._call("messages", problem))["value"]


class GroupsElsewhere(QuestionsElsewhere):
    """One with `messages` and `rewards`.

    Args:
        groups_at_once: number of calls that all processes together work on at the same time.
    """

    def __init__(self, workers: Workers, groups_at_once: int):
        super().__init__(workers)
        self.groups_at_once = groups_at_once

    async def rewards(self, problem: int, answers: Sequence[str]) -> Any:
        """How good each of the answers is."""
        found = await self._call("rewards", problem, answers)
        return [reward_of(one) for one in found["each"]] if "each" in found else found["value"]


class SingleTurnElsewhere(QuestionsElsewhere):
    """One with `messages` and `reward`.

    Args:
        at_once: number of calls that all processes together work on at the same time.
    """

    def __init__(self, workers: Workers, at_once: int):
        super().__init__(workers)
        self.at_once = at_once

    async def reward(self, problem: int, answer: str) -> Any:
        """How good `answer` is."""
        return reward_of(await self._call("reward", problem, answer))


class AskedElsewhere(SingleTurn):
    """Asks an environment in processes of its own: a call's deadline begins when a process works on it."""

    def __init__(self, environment: SingleTurnElsewhere, config: OrchestratorConfig):
        super().__init__(environment, config)
        self.calls.close()
        self.calls = AwaitedCalls(self.calls.whose, environment.at_once, config.reward_timeout)


class AskedGroupsElsewhere(GroupRewarded):
    """The same of one that rewards the answers to a problem together."""

    def __init__(self, environment: GroupsElsewhere, config: OrchestratorConfig):
        super().__init__(environment, config)
        self.calls.close()
        self.calls = AwaitedCalls(self.calls.whose, environment.groups_at_once, config.reward_timeout)


class ProgramElsewhere(Elsewhere):
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
            return state_of(self._snapshots.pop(number))

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
        self._say(message["call"], found and {"after": found.after, "value": to_send(found.value)})

    def _say(self, call: int, result: Any = None, error: Exception | None = None) -> None:
        said = {"result": result} if error is None else {"error": str(error), "kind": type(error).__name__}
        self._process.send({"type": "answer", "number": -1, "call": call, **said})


class _Failed(Exception):
    """A call of `once` raised in the process."""


def reward_of(result: Mapping[str, Any]) -> Any:
    """A reward, as the process has sent it."""
    return result["value"] if result["weights"] is None else Rewards(result["value"], result["weights"])


def state_of(sent: Mapping[str, Any]) -> Any:
    """A snapshot, as a process has sent it."""
    return base64.b64decode(sent["bytes"]) if "bytes" in sent else sent["json"]


def to_send(state: Any) -> dict[str, Any]:
    """A snapshot, as a process reads it."""
    return {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"json": state}
