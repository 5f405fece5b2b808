"""Objects with tools, one for each rollout, as TRL's `environment_factory` makes them.

`factory()` makes an object; `reset(**record)` begins a problem and may return text, which is appended to
the last message; its other public methods are tools, and `get_reward()`, if there is one, is a reward. After
a crash the object is made again, and what was called is called again: it must lead to what is recorded.
"""

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.program import Model
from cairn.orchestrator.environments.protocol import EnvironmentFailed, Rewards
from cairn.orchestrator.environments.reward_functions import RewardFunction
from cairn.orchestrator.environments.tools import Tool, ToolPrograms
from cairn.run.extensions import code_of, load

SETTING = "orchestrator.environment.args.environment_factory"
NOT_TOOLS = ("reset", "get_reward")


def load_factory(path: str) -> Callable[[], Any]:
    """What makes the objects.

    Raises:
        ValueError: an object can't be made, or lacks `reset` or tools.
        BadExtension: it can't be imported.
    """
    factory: Callable[[], Any] = load(path, {}, SETTING)
    try:
        one = factory()
    except Exception as error:
        raise ValueError(
            f"environment_factory = {path!r} is called without arguments, and raises {error!r}"
        ) from error
    if not callable(getattr(one, "reset", None)):
        raise ValueError(
            f"environment_factory = {path!r} makes a {type(one).__name__}, which has no method reset"
        )
    if not tools_of(one):
        raise ValueError(f"environment_factory = {path!r}: a {type(one).__name__} has no methods to be tools")
    return factory


def tools_of(made: object) -> list[Callable[..., Any]]:
    """The methods that the model may call, by name."""
    names = [name for name, _ in inspect.getmembers(type(made), inspect.isfunction)]
    return [getattr(made, name) for name in names if name not in NOT_TOOLS and not name.startswith("_")]


def own_reward(path: str, made: object) -> list[RewardFunction]:
    """The object's `get_reward` as a reward function of weight 1, named after its class, if it has one."""
    if not callable(getattr(made, "get_reward", None)):
        return []

    def get_reward(environments: Sequence[Any]) -> Any:
        found = environments[0].get_reward()
        return _in_list(found) if inspect.isawaitable(found) else [found]

    return [RewardFunction(type(made).__name__, get_reward, 1.0, f"{path} {code_of(path)}")]


async def _in_list(found: Awaitable[Any]) -> list[Any]:
    return [await found]


class FactoryPrograms(ToolPrograms):
    """Runs the loop of answers and calls with an object of its own for each rollout."""

    async def rollout(self, problem: int, model: Model) -> Rewards:
        episode = _Episode(self, problem, model)
        messages = list(await episode.once("reset", episode.reset))  # a copy: turns are appended to it
        reward = functools.partial(episode.reward, len(messages))
        return await self.take_turns(model, episode.once, messages, episode.calling, reward)


class _Episode:
    """The object of one rollout; there is none before the first call that is not recorded."""

    def __init__(self, programs: FactoryPrograms, problem: int, model: Model):
        self._programs, self._problem, self._model = programs, problem, model
        self._data = programs.environment
        self._made: Any = None
        self._tools: dict[str, Tool] = {}
        self._past: list[tuple[str, Callable[[], Any], Any]] = []
        """Name, call and outcome of what is recorded, while there is no object."""

    async def once(self, name: str, call: Callable[[], Any]) -> Any:
        """As `Model.once`, of a function that may need the object."""

        async def live() -> Any:
            await self._bring_back()
            return await self._model.each_time(call)

        found = await self._model.once(name, live)
        if self._made is None:
            self._past.append((name, call, found))
        return found

    async def _bring_back(self) -> None:
        """Make the object as it was after the last recorded call.

        Raises:
            EnvironmentFailed: a call leads to something else than what is recorded of it.
        """
        past, self._past = self._past, []
        for name, call, recorded in past:
            found = json.loads(json.dumps(await self._model.each_time(call)))
            if found != recorded:
                raise EnvironmentFailed(
                    f"{name}, called again after a restart, leads to something else than before: it was "
                    f"{shortened(recorded)}, and is {shortened(found)}. An object that environment_factory "
                    "makes must do the same if it is given the same calls"
                )

    def reset(self) -> Any:
        """Make the object and begin the problem; the conversation, with what the object says of it."""
        self._made = self._data.environment_factory()
        self._tools = {tool.name: tool for tool in map(Tool, tools_of(self._made))}
        said = self._made.reset(**self._data.record(self._problem))
        return self._later(said) if inspect.isawaitable(said) else self._begun(said)

    async def _later(self, said: Awaitable[Any]) -> list[dict[str, Any]]:
        return self._begun(await said)

    def _begun(self, said: Any) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self._data.messages(self._problem)
        if said is None:
            return messages
        *before, last = messages
        if not isinstance(said, str) or not isinstance(last["content"], str):
            raise EnvironmentFailed(f"reset must return text or None, and has returned {shortened(said)}")
        return [*before, {**last, "content": last["content"] + said}]

    def calling(self, function: Mapping[str, str]) -> Callable[[], Any]:
        """What makes a call of the model's."""
        if function["name"] not in self._programs.tools:
            return self._programs.calling(function)
        arguments = json.loads(function["arguments"])
        return lambda: self._tools[function["name"]].with_arguments(arguments)()

    def reward(self, begun: int, messages: list[dict[str, Any]]) -> Any:
        """The reward of the messages after the first `begun`, as JSON."""
        found = self._data.rewarded(
            self._problem, messages[:begun], messages[begun:], {"environments": [self._made]}
        )
        return self._programs.recorded(found)
