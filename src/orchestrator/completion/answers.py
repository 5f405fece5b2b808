"""Reads the model's answers: sampled tokens become an assistant's message with reasoning and tool calls."""

import ast
import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.completion.chat import ChatFormat, Stopped, shown_text, shown_tokens
from cairn.run.conversations import Message
from cairn.run.errors import UsageError
from cairn.run.extensions import syntax_tree

logger = logging.getLogger(__name__)

BEGINNINGS = ("tool_call_start_token", "tool_calls_start_token", "tool_start_token", "bot_token")
"""The names under which vLLM's tool parsers keep the text that calls begin with."""


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called; `arguments` is the JSON text of an object.

    id: the one that the model wrote itself; None where its format has none.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Answer:
    """What an answer says: its content, its reasoning if the format marks one, and its tool calls.

    malformed: whether a call begins in it that can't be read, so that it is content.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False


class AnswerParser(Protocol):
    """Reads one answer; none is an error. Malformed tool calls, and those of a cut answer, are content."""

    def __call__(
        self, token_ids: Sequence[int], tools: Sequence[Message] | None, stopped: Stopped | None = None
    ) -> Answer:
        """Read `token_ids`, which were sampled where the model could call `tools`.

        stopped: the stop string that has ended the answer, which is read up to there.
        """
        ...


class PlainText:
    """Reads every answer as content, without special tokens."""

    def __init__(self, chat: ChatFormat):
        self._chat = chat

    def __call__(
        self, token_ids: Sequence[int], tools: Sequence[Message] | None, stopped: Stopped | None = None
    ) -> Answer:
        """The answer's text."""
        return Answer(shown_text(self._chat, token_ids, stopped))


class UnknownParser(UsageError):
    """vLLM has no parser of that name, or it does not fit the tokenizer; the message says which exist."""


class VllmParser:
    """Reads answers with the parsers that `vllm serve --tool-call-parser --reasoning-parser` uses.

    The first parser of a process imports vLLM, which takes several seconds and most of a gigabyte.

    Args:
        tool_calls: name of a tool parser of vLLM, such as "hermes"; None reads no tool calls.
        reasoning: name of a reasoning parser of vLLM, such as "qwen3"; None leaves reasoning in the content.

    Raises:
        UnknownParser: vLLM has no parser of that name, or it does not fit the tokenizer.
    """

    def __init__(self, chat: ChatFormat, tool_calls: str | None = None, reasoning: str | None = None):
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        known = {"tool": ToolParserManager, "reasoning": ReasoningParserManager}
        for kind, name in {"tool": tool_calls, "reasoning": reasoning}.items():
            if name is not None and name not in (names := known[kind].list_registered()):
                raise UnknownParser(f"vLLM has no {kind} parser {name!r}; it has {', '.join(names)}")
        self._chat = chat
        self._tokenizer: Any = get_cached_tokenizer(chat.tokenizer)
        try:
            self._parser = ParserManager.get_parser(
                tool_parser_name=tool_calls,
                reasoning_parser_name=reasoning,
                enable_auto_tools=True,
                tokenizer=self._tokenizer,
            )
        except TypeError as error:
            raise UnknownParser(str(error)) from error
        self._reads_tools = tool_calls is not None
        self._complaints = _Complaints()

    def __call__(
        self, token_ids: Sequence[int], tools: Sequence[Message] | None, stopped: Stopped | None = None
    ) -> Answer:
        """The answer, split into reasoning, content and tool calls."""
        plain = Answer(shown_text(self._chat, token_ids, stopped))
        if self._parser is None:
            return plain
        try:
            return self._read(token_ids, tools, stopped, plain) or plain
        except Exception as error:  # whatever a parser makes of a malformed answer
            logger.debug("an answer is read as plain content: %r", error)
            ended = stopped is not None or (bool(token_ids) and token_ids[-1] in self._chat.stop_token_ids)
            return replace(plain, malformed=ended and bool(tools) and self._reads_tools)

    def _read(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Message] | None,
        stopped: Stopped | None,
        plain: Answer,
    ) -> Answer | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        assert self._parser is not None
        request = ChatCompletionRequest.model_validate(
            {"messages": [], "model": "policy", "tools": list(tools) if tools else None}
        )
        by_token = bool(token_ids) and token_ids[-1] in self._chat.stop_token_ids
        ended = by_token or stopped is not None
        shown, part = shown_tokens(self._chat, token_ids, stopped)
        written = list(shown[:-1] if by_token and stopped is None else shown)
        text = self._chat.full_text(written) + part
        malformed = False
        if ended and tools and self._reads_tools:  # some parsers take half a call for a whole one
            parser = self._parser(self._tokenizer, [*(request.tools or ())])
            with self._complaints.of(parser.tool_parser) as complaints:
                reasoning, content, calls = parser.parse(
                    text, request, enable_auto_tools=True, model_output_token_ids=written
                )
            malformed = bool(calls or complaints or _begins_call(text, parser.tool_parser))
            if calls and all(call.name and _is_object(call.arguments) for call in calls):
                found = tuple(
                    ToolCall(c.name, c.arguments, c.id if c.id and c.id in text else None) for c in calls
                )
                return Answer(content or "", reasoning or "", found)
        # A tool parser may drop malformed calls from the content, so the content is read without one.
        if (reader := self._parser(self._tokenizer, None).reasoning_parser) is None:
            return replace(plain, malformed=True) if malformed else None
        reasoning, content = reader.extract_reasoning(text, request)
        if not reasoning:
            return replace(plain, malformed=True) if malformed else None
        return Answer(content or "", reasoning, malformed=malformed)


class _Complaints(logging.Filter):
    """Takes what a tool parser logs of malformed calls: a traceback for each, which the metrics count."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: list[str] = []

    @contextlib.contextmanager
    def of(self, parser: object) -> Iterator[list[str]]:
        """Within, messages of the parser's module from warnings on go into the list that is returned."""
        module = logging.getLogger(type(parser).__module__)
        self._taken = []
        module.addFilter(self)
        try:
            yield self._taken
        finally:
            module.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        self._taken.append(record.getMessage())
        logger.debug("a tool call can't be read: %s", self._taken[-1])
        return False


def _begins_call(text: str, parser: object) -> bool:
    """Whether the text has a token by which calls begin, as far as the parser has such."""
    tokens = (getattr(parser, name, None) for name in BEGINNINGS)
    return any(isinstance(token, str) and token and token in text for token in tokens)


def _is_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


# The names of vLLM's parsers of tool calls and reasoning, known without importing vLLM.


TABLES = {
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""For each setting, the package of vLLM that has the parsers, and its table of their names."""


def check_parsers(config: OrchestratorConfig) -> None:
    """Check the names of the configured parsers before any process starts.

    Importing vLLM takes several seconds and most of a gigabyte, so its table of names is read from its
    source. If vLLM has no such table, the orchestrator's `VllmParser` finds out.

    Raises:
        UsageError: vLLM has no parser of that name.
    """
    for setting in TABLES:
        name, names = getattr(config, setting), None
        if name is not None:
            names = parser_names(setting)
        if names is not None and name not in names:
            known = ", ".join(sorted(names))
            raise UsageError(f"orchestrator.{setting} = {name!r}: vLLM has no such parser; it has {known}")


def parser_names(setting: str) -> set[str] | None:
    """The names that vLLM has for `tool_parser` or `reasoning_parser`; None if they can't be read."""
    package, table = TABLES[setting]
    vllm = importlib.util.find_spec("vllm")
    for folder in (vllm and vllm.submodule_search_locations) or ():
        try:
            tree = syntax_tree((Path(folder) / package / "__init__.py").read_text())
        except (OSError, SyntaxError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
                continue
            if ast.unparse(node.targets[0]) == table:
                keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                return {key for key in keys if isinstance(key, str)}
    return None
