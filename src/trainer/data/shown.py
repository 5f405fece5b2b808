"""Whether a chat template shows all that a conversation has.

A template leaves out what it does not know, without a word: roles, reasoning, calls, fields. So the texts of
a conversation are replaced by marks, it is rendered, and a mark that is not there names what would be lost.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from cairn.run.conversations import REASONING
from cairn.trainer.data.records import FLAGS

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any]], str]
"""Renders messages with tools; raises what the template raises."""

KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING, *FLAGS)
"""The fields of messages that mean something to templates, or here."""
METADATA = frozenset(
    (
        *("id", "uuid", "index", "idx", "message_id", "parent_id", "conversation_id", "openai_id"),
        *("timestamp", "time", "date", "datetime", "created", "created_at", "updated_at"),
        *("model", "model_name", "source", "origin", "url", "author", "user", "user_id", "username"),
        *("language", "lang", "country", "state", "city", "header", "hashed_ip", "system_fingerprint"),
        *("category", "tags", "topic", "status", "type", "object", "metadata", "meta", "info", "extra"),
        *("usage", "tokens", "token_count", "num_tokens", "stop_reason", "finish_reason"),
        *("annotation", "annotations", "score", "scores", "rating", "quality"),
    )
)
"""Fields of messages that say something about them, and are no part of them."""
OF_LEARNING = re.compile(r"loss|mask|train|learn|weight", re.IGNORECASE)
ROLES_FOR = {
    "developer": "system",
    "human": "user",
    "function": "tool",
    "observation": "tool",
    "model": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "chatbot": "assistant",
}
"""What most templates call roles that other programs call otherwise."""
THOUGHT = "</think>"


class _Mark(NamedTuple):
    """A text that stands for something of a conversation. message: its number; None: of the tools. field:
    where it stood. name: of that field, if the record's own."""

    text: str
    message: int | None
    field: str
    is_own: bool = False


class Shown:
    """What a template shows; remembered by the kinds of messages, so that most records cost no rendering."""

    def __init__(self, render: Render, template: str, ignored: Collection[str] = ()):
        """Args:
        template: its source.
        ignored: fields of messages that the user knows to be no part of them.
        """
        self._render = render
        self._template = template
        self._ignored = frozenset(ignored)
        self._fine: set[Any] = set()

    def problem_of(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str | None:
        """What of a conversation the template does not show, and what to do about it; None if it shows all.

        Also None if the template refuses marks in the place of the texts.

        Args:
            messages: as the template gets them.
        """
        last = len(messages) - 1
        places = {
            (messages[i - 1]["role"] if i else None, i == last, bool(tools), kind_of_message(message))
            for i, message in enumerate(messages)
        }
        if places <= self._fine:
            return None
        problem = self._look(messages, tools)
        if problem is None:
            self._fine |= places
        return problem

    def _look(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str | None:
        marks: list[_Mark] = []
        marked = [_marked(i, message, marks) for i, message in enumerate(messages)]
        marked_tools = [_marked_tool(tool, marks) for tool in tools]
        try:
            text = self._render(marked, marked_tools).lower()
        except Exception:  # of a template that reads contents; the records themselves are rendered as well
            return None
        missing = [mark for mark in marks if mark.text not in text]
        for mark in missing:
            if not any(mark.text in one for one in self._within(mark, marked, marked_tools)):
                problem = self._problem(mark, messages)
                if problem is not None:
                    return problem
        return self._problem_of_fields(messages)

    def _within(self, mark: _Mark, marked: list[dict[str, Any]], tools: list[Any]) -> list[str]:
        """Texts of the conversation's beginnings in which something may be shown that is dropped later."""
        ends = [i for i in range(len(marked)) if mark.message is None or i >= mark.message]
        after = [i for i in ends if marked[i]["role"] == "assistant"]
        texts: list[str] = []
        for end in [*ends[:1], *after[:1]]:
            try:
                texts.append(self._render(marked[: end + 1], tools).lower())
            except Exception:
                continue  # some templates want certain roles at the end
        return texts

    def _problem(self, mark: _Mark, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Why it matters that something is not shown; None if it does not."""
        if mark.message is None:
            return (
                "it has tools, and the chat template does not show their names; use a model whose template "
                "shows tools, or remove tools from the data"
            )
        role = messages[mark.message]["role"]
        if mark.is_own:
            return self._problem_of_field(mark.message, role, mark.field, messages[mark.message][mark.field])
        here = f"message {mark.message} ({role})"
        if mark.field in ("tool_calls", "the arguments of tool_calls"):
            return (
                f"the chat template does not show {mark.field} of {here}; use a model whose template shows "
                "all calls, or remove them from the data"
            )
        if mark.field == REASONING[0]:
            return (
                f"the chat template does not show the reasoning ({', '.join(REASONING)}) of {here}; put it "
                "into the content, use a model whose template shows it, or remove it from the data"
            )
        if mark.field != "content":
            return f"the chat template does not show {mark.field} of {here}; remove them from the data"
        better = ROLES_FOR.get(role.lower())
        hint = f"write the role as {better!r}, or " if better and better != role else ""
        if messages[mark.message].get("tool_calls"):
            hint = "put it into a message of its own, or "
        return f"the chat template does not show the content of {here}; {hint}leave it out of the data"

    def _problem_of_fields(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """What is wrong with fields of messages that are no text."""
        for i, message in enumerate(messages):
            for name, value in message.items():
                if name in KNOWN or isinstance(value, str):
                    continue
                if problem := self._problem_of_field(i, message["role"], name, value):
                    return problem
        return None

    def _problem_of_field(self, i: int, role: str, name: str, value: Any) -> str | None:
        """Why a field that the template does not show has to be dealt with; None if it is harmless."""
        if name in self._ignored or name == "name" or name.startswith("_") or name in METADATA:
            return None
        if not isinstance(value, str) and re.search(rf"\b{re.escape(name)}\b", self._template):
            return None
        of_learning = OF_LEARNING.search(name)
        near = difflib.get_close_matches(name.lower(), KNOWN, 1, cutoff=0.75)
        if not (of_learning or near) and (isinstance(value, int | float) or not value):
            return None
        what = f"message {i} ({role}) has the field {name!r}, which the chat template does not show"
        if of_learning:
            what += f"; whether a turn is learned is said by {', '.join(FLAGS)}"
        elif near:
            what += f"; did you mean {near[0]!r}?"
        return f"{what}; if it is no part of the message, leave it out with --data.ignore {name}"


def kind_of_message(message: Mapping[str, Any]) -> Any:
    """What messages have in common that a template treats alike."""
    return (
        message["role"],
        *((name, _kind(name, value)) for name, value in sorted(message.items()) if name != "role"),
    )


def _kind(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return (bool(value.strip()), THOUGHT in value)
    if name == "tool_calls":
        calls = cast("Sequence[Mapping[str, Any]]", value)
        return (len(calls) > 1, *sorted({type(call["function"].get("arguments")).__name__ for call in calls}))
    return type(value).__name__, bool(value)


def _mark(marks: list[_Mark], message: int | None, field: str, is_own: bool = False) -> str:
    marks.append(_Mark(f"zq{len(marks)}qz", message, field, is_own))
    return marks[-1].text


def _marked(i: int, message: Mapping[str, Any], marks: list[_Mark]) -> dict[str, Any]:
    """A message with marks in the place of its texts."""
    marked = dict(message)
    reasoning = [name for name in REASONING if _is_text(message.get(name))]
    if reasoning and message["role"] == "assistant":
        marked |= dict.fromkeys(reasoning, _mark(marks, i, REASONING[0]))
    for name, value in message.items():
        if name in ("role", "tool_call_id") or name in reasoning or not _is_text(value):
            continue
        if name != "content":
            marked[name] = _mark(marks, i, name, is_own=True)
        elif THOUGHT in value:
            thoughts = _mark(marks, i, "the thoughts (<think>) in the content")
            marked[name] = f"<think>\n{thoughts}\n</think>\n\n{_mark(marks, i, name)}"
        else:
            marked[name] = _mark(marks, i, name)
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(i, call, marks) for call in calls]
    return marked


def _marked_call(i: int, call: Mapping[str, Any], marks: list[_Mark]) -> dict[str, Any]:
    function, mark = dict(call["function"]), _mark(marks, i, "the arguments of tool_calls")
    function["name"] = _mark(marks, i, "tool_calls")
    given = function.get("arguments")
    function["arguments"] = {**given, "value": mark} if isinstance(given, Mapping) else mark
    return {**call, "function": function}


def _marked_tool(tool: Any, marks: list[_Mark]) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    found = cast("Mapping[str, Any]", tool)
    inner = found.get("function")
    if isinstance(inner, Mapping):
        return {
            **found,
            "function": {**cast("Mapping[str, Any]", inner), "name": _mark(marks, None, "tools")},
        }
    return {**found, "name": _mark(marks, None, "tools")} if "name" in found else tool


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
