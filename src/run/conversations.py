"""Messages of conversations, as clients write them and as chat templates expect them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cairn.run.errors import UsageError
from cairn.run.files import read_json
from cairn.run.records.numbers import parse

# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false


Message = Mapping[str, Any]
"""One message of a conversation, as in OpenAI's chat completions."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that chat templates and clients use for the reasoning of an assistant's message."""
TEXTS = ("text", "input_text", "output_text")
"""What the parts of a content are called that are text: in chat completions, and in responses."""


class NoPrompt(ValueError):
    """The chat template renders no prompt from a conversation; the message says why."""

    passing = False
    """Another try meets the same."""


def flat(content: Any) -> Any:
    """The content of a message; a list of texts, as clients write it, is joined to one text."""
    if isinstance(content, list) and content and all(is_text(part) for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def is_plain(message: Message) -> bool:
    """Whether the message is a role and a text, and nothing else."""
    return (
        type(message) is dict
        and len(message) == 2
        and "role" in message
        and type(message.get("content")) is str
    )


def arguments_of(call: Message) -> Any:
    """The arguments of a tool call, decoded from JSON text if they are such a text.

    Text that can't be kept as a value, such as one with a key twice, stays text.
    """
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments)
        except ValueError:
            return arguments
    return arguments


def is_text(part: Any) -> bool:
    """Whether a part of a content is text, as one of the interfaces for chats writes it."""
    return isinstance(part, Mapping) and part.get("type") in TEXTS and isinstance(part.get("text"), str)


def for_template(message: Message) -> Message:
    """The message as chat templates expect it: fields that are None are left out, and arguments are objects.

    The reasoning stands under every name that templates read.
    """
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] # the template will say what it misses
        return message
    shown = {name: value for name, value in message.items() if value is not None}
    if "content" in message:
        shown["content"] = "" if message["content"] is None else flat(message["content"])
    if message.get("role") != "assistant":
        return shown
    shown.setdefault("content", "")
    if reasoning := next((shown[name] for name in REASONING if shown.get(name)), None):
        shown |= dict.fromkeys(REASONING, reasoning)
    if calls := shown.pop("tool_calls", None):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call)}} for call in calls
        ]
    return shown


# The tokens that end an answer: those that the tokenizer, generation_config.json and config.json name.


GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "the tokenizer"
"""Stands for the tokenizer among the places that name a token."""


def end_tokens(folder: Path, eos_token_id: int | None) -> dict[int, tuple[str, ...]]:
    """The ids of the tokens that end an answer, ascending, each with the places that name it.

    Args:
        folder: Hugging Face directory, in which generation_config.json and config.json are read.
        eos_token_id: that of the directory's tokenizer; None if it has none.

    Returns:
        The places are TOKENIZER and names of files, such as `{7: ("the tokenizer", "config.json")}`.

    Raises:
        DamagedFile: one of the files is damaged.
        UsageError: one of them has an `eos_token_id` that is no token id.
    """
    named: dict[int, list[str]] = {}
    if eos_token_id is not None:
        named[eos_token_id] = [TOKENIZER]
    for name in (GENERATION_CONFIG, "config.json"):
        for token_id in _named_in(folder / name):
            named.setdefault(token_id, []).append(name)
    return {token_id: tuple(dict.fromkeys(named[token_id])) for token_id in sorted(named)}


def _named_in(path: Path) -> list[int]:
    about = read_json(path, dict[str, Any]) or {}
    text = about.get("text_config")
    parts = [about, cast("Mapping[str, Any]", text)] if isinstance(text, Mapping) else [about]
    found: list[int] = []
    for part in parts:
        ids = part.get("eos_token_id")
        for token_id in cast("list[Any]", ids) if isinstance(ids, list) else [ids]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise UsageError(
                    f"{path}: has eos_token_id = {ids!r}; it must be a token id, or a list of them"
                )
            if token_id >= 0:  # some files say -1 for none
                found.append(token_id)
    return found
