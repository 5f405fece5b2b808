"""Environments whose tools are Python functions: the model calls them until it answers without a call."""

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import ValidationError, validate_call

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import MAX_TURNS, shortened, wrong_with_methods, wrong_with_turns
from cairn.orchestrator.environments.program import Model, Programs, no_tool_parser
from cairn.orchestrator.environments.protocol import (
    COUNTED,
    TOOL_COUNTS,
    EnvironmentFailed,
    Rewards,
    Unscored,
    says_nothing,
    to_json,
)
from cairn.orchestrator.environments.single_turn import messages_of, wrong_with_conversation
from cairn.orchestrator.environments.tool_schemas import CONFIG, choices_of, tool_schema
from cairn.run.output import quoted, writable


class ToolEnvironment(Protocol):
    """A set of problems for whose solution the model may call functions.

    Problem i must be the same in every process and every run. Optional attributes: `max_turns`, the maximum
    number of answers of a rollout, and `identity`, text that must change whenever the problems or rewards do.
    """

    tools: Sequence[Callable[..., Any]]
    """Functions or coroutine functions with type hints and a docstring in Google's style."""

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def messages(self, problem: int) -> Sequence[Mapping[str, Any]]:
        """The conversation that asks problem number `problem`."""
        ...

    def reward(self, problem: int, answer: str) -> float | Mapping[str, float] | Rewards:
        """How good a rollout is whose last answer is `answer`.

        An argument `messages`, if it has one, is the whole conversation.
        """
        ...


class Tool:
    """A function that the model may call.

    Raises:
        ValueError: it can't be a tool; the message says why.
    """

    def __init__(self, function: Callable[..., Any]):
        self.schema = tool_schema(function)
        """As in OpenAI's `tools`."""
        self.name: str = self.schema["function"]["name"]
        self._choices = choices_of(function)
        self._call = validate_call(config=CONFIG)(function)
        self._is_coroutine = inspect.iscoroutinefunction(function)

    def with_arguments(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """What calls the function and returns the outcome; a coroutine function if the function is one."""
        for name, values in self._choices.items():
            if isinstance(value := arguments.get(name), str) and value not in values:
                wrong = f"{name}: Input should be one of {', '.join(map(repr, values))}"
                return lambda: {"error": f"Error: wrong arguments: {wrong}"}
        call = functools.partial(self._call, **arguments)
        return functools.partial(_outcome_of_coroutine if self._is_coroutine else _outcome, call)


def _outcome(call: Callable[[], Any]) -> "dict[str, str] | Awaitable[dict[str, str]]":
    try:
        found = call()
    except EnvironmentFailed:
        raise
    except Exception as error:
        return _error(error)
    return _outcome_of_coroutine(lambda: found) if inspect.isawaitable(found) else _result(found)


async def _outcome_of_coroutine(call: Callable[[], Awaitable[Any]]) -> dict[str, str]:
    try:
        return _result(await call())
    except EnvironmentFailed:
        raise
    except Exception as error:
        return _error(error)


def _result(found: Any) -> dict[str, str]:
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    return {"content": writable(text)}


def _error(error: Exception) -> dict[str, str]:
    """The outcome of a call that failed, in the words that the model reads."""
    if isinstance(error, ValidationError):
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        return {"error": f"Error: wrong arguments: {'; '.join(wrong)}"}
    return {"error": f"Error: {type(error).__name__}: {quoted(error)}"}


class ToolPrograms(Programs):
    """Runs the loop of answers and calls for an environment with `tools`."""

    def __init__(self, environment: Any, config: OrchestratorConfig):
        super().__init__(environment, config)
        self.tools = {tool.name: tool for tool in map(Tool, environment.tools)}
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.max_turns: int = getattr(environment, "max_turns", MAX_TURNS)
        self._reads_calls = config.tool_parser is not None
        try:
            parameters = inspect.signature(environment.reward).parameters
        except ValueError:  # inspect knows no signature of it
            parameters = {}
        self._rewards_messages = "messages" in parameters

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        methods = {"messages": ("problem",)}
        if wrong := wrong_with_methods(environment, methods):
            return wrong
        if not callable(getattr(environment, "reward", None)):
            return "it has no method reward(problem, answer) or reward(problem, answer, messages)"
        if not isinstance(environment.tools, list | tuple) or not environment.tools:
            return f"its tools must be a list of functions, and are {shortened(environment.tools)}"
        names: list[str] = []
        for function in environment.tools:
            try:
                names.append(Tool(function).name)
            except Exception as error:
                return f"its tool {getattr(function, '__name__', function)!s} can't be described: {error}"
        if len(set(names)) < len(names):
            return f"two of its tools have the same name: {', '.join(names)}"
        return wrong_with_turns(environment)

    async def lacks(self) -> str | None:
        return None if self._reads_calls else str(no_tool_parser(self.name))

    async def shown(self, problem: int) -> dict[str, Any]:
        return {"messages": await messages_of(self, problem), "tools": self.schemas}

    def start(self, problem: int, model: Model) -> Awaitable[Any]:
        return self.calls.on_own_loop(functools.partial(self.rollout, problem, model))

    async def rollout(self, problem: int, model: Model) -> Rewards:
        """Let the model answer, and call its tools, until it calls none or `max_turns` is reached."""
        environment = self.environment
        messages: list[Any] = await model.once("messages", lambda: environment.messages(problem))
        if wrong := wrong_with_conversation(messages):
            raise EnvironmentFailed(f"messages({problem}) must return a list of messages, and {wrong}")
        return await self.take_turns(
            model, model.once, messages, self.calling, functools.partial(self._reward, problem)
        )

    async def take_turns(
        self,
        model: Model,
        once: Callable[[str, Callable[[], Any]], Awaitable[Any]],
        messages: list[Any],
        calling: Callable[[Mapping[str, str]], Callable[[], Any]],
        reward: Callable[[list[Any]], Any],
    ) -> Rewards:
        """The loop.

        Args:
            once: as `Model.once`.
            messages: the conversation before the first answer.
            calling: what makes a call of the model's.
            reward: of the whole conversation, as JSON.
        """
        called = errors = 0
        for turn in range(self.max_turns):
            reply = await model.generate(messages, tools=self.schemas)
            messages.append(reply.message)
            calls = reply.message.get("tool_calls", ())
            if not calls or turn + 1 == self.max_turns:
                break
            for call in calls:
                name = call["function"]["name"]
                outcome = await once(f"tool {name}", calling(call["function"]))
                called, errors = called + 1, errors + ("error" in outcome)
                content = outcome.get("content", outcome.get("error"))
                said = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
                messages.append(said)
        rewards = await once("reward", functools.partial(reward, messages))
        counts = dict(zip(TOOL_COUNTS, (called, errors), strict=True))
        return Rewards(rewards["parts"] | counts, rewards["weights"] | dict.fromkeys(counts, 0.0))

    def calling(self, function: Mapping[str, str]) -> Callable[[], Any]:
        """What makes a call of the model's."""
        tool = self.tools.get(function["name"])
        if tool is None:
            known = ", ".join(self.tools)
            return lambda: {"error": f"Error: there is no tool {function['name']!r}, only: {known}"}
        return tool.with_arguments(json.loads(function["arguments"]))

    def _reward(self, problem: int, messages: list[dict[str, Any]]) -> Any:
        """The environment's reward, as JSON."""
        further = {"messages": messages} if self._rewards_messages else {}
        return self.recorded(self.environment.reward(problem, messages[-1]["content"] or "", **further))

    @staticmethod
    def recorded(found: Any) -> Any:
        """A reward as it is recorded; an awaitable of that, if it is one.

        Raises:
            EnvironmentFailed: it is none.
        """
        return _awaited_reward(found) if inspect.isawaitable(found) else _checked(found)


async def _awaited_reward(found: Awaitable[Any]) -> dict[str, dict[str, float]]:
    return _checked(await found)


def _checked(found: Any) -> dict[str, dict[str, float]]:
    """Parts and weights of a reward; a number is the part "answer".

    Raises:
        EnvironmentFailed: it is none.
    """
    if says_nothing(found):
        raise Unscored("reward returned None, which means that it has nothing to say of the answer")
    reward = to_json(found, "answer")
    if isinstance(reward, str):
        raise EnvironmentFailed(f"reward must return a finite reward, but {reward}: {shortened(found)}")
    if taken := reward["parts"].keys() & COUNTED:
        raise EnvironmentFailed(
            f"reward must call no part {min(taken)!r}: the calls are counted under that name"
        )
    return reward
