"""Reads the model's answers: sampled tokens become an assistant's message with reasoning and tool calls."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cairn.orchestrator.chat import ChatFormat
from cairn.orchestrator.stopping import Stopped, shown_text, shown_tokens
from cairn.run.conversations import Message
from cairn.run.errors import UsageError

logger = logging.getLogger(__name__)


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
    """What an answer says: its content, its reasoning if the format marks one, and its tool calls."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


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

    def __call__(
        self, token_ids: Sequence[int], tools: Sequence[Message] | None, stopped: Stopped | None = None
    ) -> Answer:
        """The answer, split into reasoning, content and tool calls."""
        plain = Answer(shown_text(self._chat, token_ids, stopped))
        if self._parser is None:
            return plain
        try:
            return self._read(token_ids, tools, stopped) or plain
        except Exception as error:  # whatever a parser makes of a malformed answer
            logger.debug("an answer is read as plain content: %r", error)
            return plain

    def _read(
        self, token_ids: Sequence[int], tools: Sequence[Message] | None, stopped: Stopped | None
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
        if ended and tools and self._reads_tools:  # some parsers take half a call for a whole one
            parser = self._parser(self._tokenizer, [*(request.tools or ())])
            reasoning, content, calls = parser.parse(
                text, request, enable_auto_tools=True, model_output_token_ids=written
            )
            if calls and all(call.name and _is_object(call.arguments) for call in calls):
                found = tuple(
                    ToolCall(c.name, c.arguments, c.id if c.id and c.id in text else None) for c in calls
                )
                return Answer(content or "", reasoning or "", found)
        # A tool parser may drop malformed calls from the content, so the content is read without one.
        if (reader := self._parser(self._tokenizer, None).reasoning_parser) is None:
            return None
        reasoning, content = reader.extract_reasoning(text, request)
        return Answer(content or "", reasoning) if reasoning else None


def _is_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False
