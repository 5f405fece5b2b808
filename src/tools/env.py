"""`cairn env try`: what an environment asks, and what its reward gives for answers that somebody types.

Nothing is trained, served or recorded. The environment is made and asked as in a run, so what a run would
refuse is refused here.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from cairn.config.environment import EnvironmentConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.shared import ToolCommand
from cairn.orchestrator.environments import (
    AgentPrograms,
    BadEnvironment,
    EnvironmentFailed,
    GroupRewarded,
    Programs,
    Reply,
    SingleTurn,
    Snapshot,
    Unscored,
    ask,
    make_environment,
)
from cairn.orchestrator.environments.calls import AskedEnvironment, Raised
from cairn.orchestrator.environments.protocol import in_parts
from cairn.run.conversations import NoPrompt
from cairn.run.errors import CairnError, UsageError
from cairn.run.waiting import run_async
from cairn.tools.ckpt_output import print_json, say

SHOWN_TOKENS = 200
"""Tokens of a prompt or an answer that are listed one by one."""
PACKAGE = Path(__file__).parents[1]


class Try(ToolCommand):
    """Ask an environment for a problem, answer it, and see the reward. Answers are typed, a line each.

    A conversation with several turns goes on until the environment ends it. If it has tools, an answer such
    as {"name": "add", "arguments": {"a": 1, "b": 2}} calls one.
    """

    command = "cairn env try"
    positional = ("environment",)
    environment: str
    """A built-in environment, an installed plug-in, or module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the environment's constructor, as of environment.args, such as --args.problems 10."""
    problem: int = Field(default=0, ge=0)
    """Number of the problem."""
    answer: list[str] = []
    """Answers in their order, in place of those that are typed."""
    tokenizer: Path | None = None
    """A Hugging Face directory, such as a model or a step's model/: also show the tokens."""
    seed: int = Field(default=0, ge=0)
    """Seed of the rollout, which worlds and programs may draw from."""

    def execute(self) -> int:
        config = OrchestratorConfig(environment=EnvironmentConfig(name=self.environment, args=self.args))
        with _unlogged():  # what fails is shown here
            return self._try(config)

    def _try(self, config: OrchestratorConfig) -> int:
        answers = _Answers(self.answer)
        shown = _Shown(self.tokenizer, quiet=self.as_json)
        try:
            environment = make_environment(config.environment)
        except BadEnvironment as error:
            raise UsageError(str(error)) from None
        with ask(environment, config) as asked:
            if self.problem >= asked.problems:
                raise UsageError(
                    f"--problem {self.problem}: the environment has {asked.problems} problems, "
                    f"0 to {asked.problems - 1}"
                )
            shown.say(f"problem {self.problem} of {asked.problems}, of the environment {self.environment}")
            try:
                found = run_async(_tried(asked, self, answers, shown))
            except (EnvironmentFailed, Raised) as error:
                raise _explained(error) from error
        if self.as_json:
            print_json({"environment": self.environment, "problem": self.problem, **found})
        return 0


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Log nothing of the orchestrator's that is not critical."""
    log = logging.getLogger("cairn.orchestrator")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class TryFailed(CairnError):
    """The environment, which is the user's code, failed; the message ends with its traceback."""


def _explained(error: BaseException) -> CairnError:
    """What to tell of a failure: the message, below the traceback of the user's code without Cairn's own."""
    cause: BaseException = error
    while isinstance(cause, EnvironmentFailed | Raised):
        inner = cause.error if isinstance(cause, Raised) else cause.__cause__
        if inner is None:
            return TryFailed(str(cause))
        cause = inner
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if not Path(frame.filename).is_relative_to(PACKAGE)
    ]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    raised = "".join([*lines, *traceback.format_exception_only(cause)]).rstrip()
    what = str(error) if isinstance(error, EnvironmentFailed) else f"it raised {type(cause).__name__}"
    return TryFailed(f"{what.partition(chr(10))[0]}\n{raised}")


class _Answers:
    """The answers, one after the other: those that were given, else lines of standard input."""

    def __init__(self, given: Sequence[str]):
        self._given = list(given)
        self._typed = not given

    def next(self) -> str | None:
        """The next one; None if there are no more."""
        if not self._typed:
            return self._given.pop(0) if self._given else None
        if sys.stdin.isatty():
            print("answer (Ctrl-D ends): ", end="", flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class _Shown:
    """Prints conversations, as text and as tokens."""

    def __init__(self, tokenizer: Path | None, *, quiet: bool):
        self._quiet = quiet
        self.chat: Any = None
        if tokenizer is not None:
            if not (tokenizer / "tokenizer_config.json").is_file():
                raise UsageError(
                    f"--tokenizer {tokenizer}: it has no tokenizer_config.json; give a Hugging Face "
                    "directory, such as a model, or model/ of a step"
                )
            from cairn.orchestrator.completion.chat import ChatFormat

            self.chat = ChatFormat(tokenizer)

    def say(self, text: str) -> None:
        """Print a line, unless the output is JSON."""
        if not self._quiet:
            say(text)

    def messages(self, messages: Sequence[Any]) -> None:
        """Print messages, a head line and a text for each."""
        for message in messages:
            said = message.get("content")
            calls = message.get("tool_calls")
            text = (
                said
                if isinstance(said, str)
                else ""
                if said is None
                else json.dumps(said, ensure_ascii=False)
            )
            self.say(f"--- {message['role']}{' ' + str(message['name']) if message.get('name') else ''}")
            self.say(text + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else ""))

    def prompt(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> dict[str, Any]:
        """Print a conversation as the model reads it; returns the same as JSON, empty without a tokenizer."""
        if self.chat is None:
            return {}
        try:
            text, token_ids = self.chat.rendering(messages, tools), list(self.chat.prompt(messages, tools))
        except NoPrompt as error:
            raise UsageError(f"--tokenizer: {error}") from None
        self.say(f"--- as the model reads it, {len(token_ids)} tokens\n{text}")
        self.say(self.tokens(token_ids))
        return {"prompt": text, "prompt_ids": token_ids}

    def answer(self, text: str) -> dict[str, Any]:
        """Print an answer as tokens, which are those that are learned from; returns them as JSON."""
        if self.chat is None:
            return {}
        ends = [self.chat.stop_token_ids[0]] if self.chat.stop_token_ids else []
        token_ids = [*self.chat.tokenizer(text, add_special_tokens=False)["input_ids"], *ends]
        self.say(f"--- the answer as the record has it, {len(token_ids)} tokens, all of them learned")
        self.say(self.tokens(token_ids))
        return {"answer_ids": token_ids}

    def tokens(self, token_ids: Sequence[int]) -> str:
        """Token ids, each with its text."""
        listed = "  ".join(f"{one} {self.chat.full_text([one])!r}" for one in token_ids[:SHOWN_TOKENS])
        more = len(token_ids) - SHOWN_TOKENS
        return f"{listed}  ... and {more} more" if more > 0 else listed


async def _tried(asked: AskedEnvironment, wanted: Try, answers: _Answers, shown: _Shown) -> dict[str, Any]:
    """What came of trying the environment, as JSON."""
    if isinstance(asked, SingleTurn):
        return await _single_turns(asked, wanted.problem, answers, shown)
    if isinstance(asked, AgentPrograms):
        raise UsageError(
            f"{wanted.environment}: an agent is a program that asks a server, and nobody types its requests; "
            "try its reward in a test of yours, and the agent against a server that `inference` starts"
        )
    assert isinstance(asked, Programs)
    return await _several_turns(asked, wanted, answers, shown)


async def _single_turns(asked: SingleTurn, problem: int, answers: _Answers, shown: _Shown) -> dict[str, Any]:
    """Ask for the problem once, and reward one answer after the other, or all of a group together."""
    messages = await asked.messages(problem)
    shown.messages(messages)
    found: dict[str, Any] = {"messages": messages, **shown.prompt(messages), "answers": []}
    texts: list[str] = []
    while (text := await asyncio.to_thread(answers.next)) is not None:
        record: dict[str, Any] = {"answer": text, **shown.answer(text)}
        found["answers"].append(record)
        texts.append(text)
        if isinstance(asked, GroupRewarded):
            continue
        try:
            reward, parts = await asked.reward(problem, text)
        except Unscored as error:
            record |= {"reward": None}
            shown.say(f"no reward, so that nothing is learned from the answer: {error}")
            continue
        record |= {"reward": reward, "parts": parts}
        shown.say(f"reward {_in_words(reward, parts)} for {text!r}")
    if isinstance(asked, GroupRewarded) and texts:
        for record, one in zip(found["answers"], await asked.rewards(problem, texts), strict=True):
            record |= {"reward": None} if one is None else {"reward": one[0], "parts": one[1]}
            said = "none" if one is None else _in_words(*one)
            shown.say(f"reward {said} for {record['answer']!r}, among {len(texts)} answers")
    return found


async def _several_turns(asked: Programs, wanted: Try, answers: _Answers, shown: _Shown) -> dict[str, Any]:
    """Let the environment's program run, with a person in the place of the model."""
    model = TypedModel(wanted.seed, answers, shown)
    try:
        outcome = await asked.start(wanted.problem, model)
    except Raised as raised:
        if isinstance(raised.error, NoMoreAnswers):
            raise raised.error from None
        if isinstance(raised.error, Unscored):
            shown.say(f"no reward, so that nothing is learned from the rollout: {raised.error}")
            return {"turns": model.turns, "reward": None}
        raise
    reward = in_parts(outcome)
    if isinstance(reward, str):
        raise EnvironmentFailed(
            f"rollout must return a finite number or named parts, but {reward}: {outcome!r}"
        )
    shown.messages(model.left_over)
    shown.say(f"reward {_in_words(*reward)} for {len(model.turns)} answers")
    return {"turns": model.turns, "reward": reward[0], "parts": reward[1]}


def _in_words(reward: float, parts: Mapping[str, float]) -> str:
    named = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    return f"{reward:g}{f' ({named})' if named else ''}"


class NoMoreAnswers(UsageError):
    """The environment asks for another answer, and there is none."""


class TypedModel:
    """A person in the place of the model that a program asks (`Model`). Nothing is recorded."""

    def __init__(self, seed: int, answers: _Answers, shown: _Shown):
        self.seed = seed
        self.turns: list[dict[str, Any]] = []
        """What each answer was given to, and the answer."""
        self.left_over: list[Any] = []
        self._answers = answers
        self._shown = shown
        self._seen: list[Any] = []
        self._tools: set[str] = set()

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Show what is new of the conversation, and have the person answer it.

        Raises:
            NoMoreAnswers: the person has none.
        """
        whole = list(messages)
        known = len(self._seen) if whole[: len(self._seen)] == self._seen else 0
        if known == 0 and self._seen:
            self._shown.say("=== the conversation begins anew")
        self._shown.messages(whole[known:])
        names = {str(tool["function"]["name"]): tool for tool in tools or ()}
        for name in names.keys() - self._tools:
            self._shown.say(f"--- tool {name}\n{json.dumps(names[name]['function'], ensure_ascii=False)}")
        self._tools |= names.keys()
        turn: dict[str, Any] = {"messages": whole, **self._shown.prompt(whole, tools)}
        text = await asyncio.to_thread(self._answers.next)
        if text is None:
            raise NoMoreAnswers(
                f"after {len(self.turns)} answers the environment asks for another one; give it with "
                "--answer, or type it"
            )
        message = self._called(text, names, len(self.turns)) or {"role": "assistant", "content": text}
        self.turns.append({**turn, "answer": message, **self._shown.answer(text)})
        self._seen = [*whole, message]
        return Reply("" if message.get("tool_calls") else text, [0], "stop", message, 0)

    @staticmethod
    def _called(text: str, names: Mapping[str, Any], number: int) -> dict[str, Any] | None:
        """The message of an answer that calls a tool."""
        try:
            call = json.loads(text)
        except ValueError:
            return None
        if not names or not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        function = {"name": str(call["name"]), "arguments": json.dumps(call["arguments"])}
        made = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [made]}

    async def count_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Number of tokens of a conversation.

        Raises:
            UsageError: there is no tokenizer to count them with.
        """
        if self._shown.chat is None:
            raise UsageError("the environment counts tokens: give --tokenizer")
        return len(self._shown.chat.prompt(messages, tools))

    async def once(
        self, name: str, call: Callable[[], Any], *, snapshot: Callable[[], Any] | None = None
    ) -> Any:
        """The result of `call()`, as JSON."""
        return json.loads(json.dumps(await _result(call)))

    async def each_time(self, call: Callable[[], Any]) -> Any:
        """The result of `call()`."""
        return await _result(call)

    async def skip_to(self, name: str) -> Any:
        """Nothing: no call is recorded."""

    async def snapshot(self) -> Snapshot | None:
        """None: nothing is recorded."""

    def pause(self) -> Callable[[], None]:
        """Time is not counted."""
        return lambda: None


async def _result(call: Callable[[], Any]) -> Any:
    found = call()
    return await found if inspect.isawaitable(found) else found
