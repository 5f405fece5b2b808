"""Environments with tools and with worlds in processes of their own.

The loop of answers, calls and steps runs here, as for those in this process. So a process that is killed
costs the call that it was at: its world is made again in another one, from recorded steps or a snapshot.
"""

import inspect
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.orchestrator.environments.asked import MAX_TURNS
from cairn.orchestrator.environments.elsewhere import Elsewhere, reward_of, state_of, to_send
from cairn.orchestrator.environments.worker_process import WorkerProcess, Workers

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


class ToolsElsewhere(Elsewhere):
    """One with `tools`, `messages` and `reward`."""

    def __init__(self, workers: Workers):
        super().__init__(workers)
        self.max_turns: int = workers.about.get("max_turns", MAX_TURNS)
        self.tools = [self._tool(**about) for about in workers.about["tools"]]

    async def messages(self, problem: int) -> Any:
        """The conversation that asks problem number `problem`."""
        return (await self._call("messages", problem))["value"]

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
    """The type that a process has described (`worker_tools.type_of`)."""
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


class WorldElsewhere(Elsewhere):
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
        """Close a world; that of a process which has ended is gone."""
        if not world.process.dead:
            await world.do("close")

    async def _messages(self, problem: int) -> Any:
        return (await self._call("messages", problem))["value"]

    async def _snapshot(self, world: World) -> Any:
        return state_of(await world.do("snapshot"))

    async def _restore(self, problem: int, seed: int, snapshot: Any) -> World:
        world = World(await self._workers.any(), next(self._numbers))
        await world.do("restore", problem, seed, to_send(snapshot))
        return world
