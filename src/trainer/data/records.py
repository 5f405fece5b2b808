"""What a record must hold to be trained on, and the conversation in it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from cairn.run.conversations import for_template, is_plain, is_text
from cairn.run.data_sets import kind_of
from cairn.run.records.numbers import parse

FLAGS = {
    "train": True,
    "weight": True,
    "loss": True,
    "loss_mask": True,
    "trainable": True,
    "training": True,
    "masked": False,
}
"""By name, whether a turn is learned whose flag is true. A flag is true or false, or 1 or 0."""


def flag_of(message: Mapping[str, Any]) -> bool | None:
    """Whether the flags of a message say that its turn is learned; None if it has none."""
    for name, means in FLAGS.items():
        if (value := message.get(name)) is not None:
            return bool(value) is means
    return None


def problem_of_flags(message: Mapping[str, Any]) -> str | None:
    """What is wrong with the flags of a message; None if nothing is."""
    said: dict[bool, str] = {}
    for name, means in FLAGS.items():
        value = message.get(name)
        if value is None:
            continue
        if not _is_flag(value):
            how = "0 or 1" if name == "weight" else "true or false"
            return f"has {name} = {value!r}, which must be {how}: a turn is learned, or it is not"
        said[bool(value) is means] = f"{name} = {value!r}"
    return f"has {said[True]} and {said[False]}, which contradict each other" if len(said) == 2 else None


def flags_beside(record: Mapping[str, Any], count: int) -> list[bool | None]:
    """What the flags beside the messages say of each of them; None where none says anything."""
    flags: list[bool | None] = [None] * count
    for name, means in FLAGS.items():
        if isinstance(values := record.get(name), list):
            flags = [bool(value) is means for value in cast("list[Any]", values)]
    return flags


def problem_of_flags_beside(record: Mapping[str, Any], messages: Sequence[Any] | None) -> str | None:
    """What is wrong with flags beside the messages; None if nothing is.

    Args:
        messages: None if the record has texts.
    """
    for name, means in FLAGS.items():
        value = record.get(name)
        if isinstance(value, list):
            flags = cast("list[Any]", value)
            if messages is None:
                return f"it has {name} beside texts, of which the whole completion is learned; give messages"
            if len(flags) != len(messages):
                return f"its {name} has {len(flags)} values, and there are {len(messages)} messages"
            wrong = [one for one in flags if not _is_flag(one)]
            if wrong:
                return (
                    f"its {name} has the value {wrong[0]!r}, which must be 0 or 1: a turn is learned, or not"
                )
        elif _is_flag(value) and bool(value) is not means:
            return (
                f"its {name} = {value!r} says that nothing of it is learned; leave the record out, or remove "
                "the field"
            )
        elif name == "weight" and isinstance(value, int | float) and not _is_flag(value):
            return f"its weight is {value}, and records have no weights of their own here: remove the field"
    return None


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | float) and value in (0, 1)


ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of ShareGPT's messages (`from`), and what chat templates call them."""
TEXTS_ALONE = 'only text can be trained on: each must be {"type": "text", "text": "..."}'
PARTS = {
    "thinking": "give reasoning as reasoning_content of the message",
    "reasoning": "give reasoning as reasoning_content of the message",
    "tool_use": "give calls as tool_calls of the message",
    "tool_call": "give calls as tool_calls of the message",
    "tool_result": 'give it as a message of its own, with the role "tool"',
}
"""By the type of a part that is no text, what to do about it."""


@dataclass(frozen=True)
class Turns:
    """The conversation of a record.

    messages: as chat templates expect them. learned: numbers of those whose turns are learned, in order.
    tools: JSON schemas of the functions that the model may call.
    """

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[int]
    tools: Sequence[Any] = field(default_factory=list[Any])


def problem_of(record: Mapping[str, Any]) -> str | None:
    """Why a record can't be trained on, or None."""
    if record.get("messages"):
        return _problem_of_conversation("messages", record["messages"], record)
    if record.get("conversations"):
        return _problem_of_conversation("conversations", _standard(record), record)
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None or completion is None:
        return _problem_of_fields(record)
    if record.get("label") is False:
        return (
            "its label is false, so its completion is an undesirable answer, from which `uv run dpo "
            "--loss.type kto` learns; to learn it as it stands, leave out label"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return problem_of_flags_beside(record, None)
    if isinstance(prompt, str) or isinstance(completion, str):
        return "prompt and completion must both be text, or both lists of messages"
    return (
        _problem_of_messages("prompt", prompt)
        or _problem_of_messages("completion", completion)
        or _problem_of_tools(record)
        or problem_of_flags_beside(record, [*prompt, *completion])
    )


def _problem_of_conversation(field: str, messages: Any, record: Mapping[str, Any]) -> str | None:
    return (
        _problem_of_messages(field, messages)
        or _problem_of_tools(record)
        or problem_of_flags_beside(record, record[field])
    )


def turns_of(record: Mapping[str, Any], roles: Collection[str] = ("assistant",)) -> Turns | None:
    """The conversation of a record that `problem_of` finds no fault with; None if it is plain text.

    Args:
        roles: those whose turns are learned; of `prompt` and `completion`, only the completion's are.
    """
    first = 0
    if record.get("messages"):
        messages = record["messages"]
    elif record.get("conversations"):
        messages = _standard(record)
    elif isinstance(record["prompt"], str):
        return None
    else:
        first = len(record["prompt"])
        messages = [*record["prompt"], *record["completion"]]
    count = len(record.get("messages") or record.get("conversations") or messages)
    beside = [None] * (len(messages) - count) + flags_beside(record, count)  # `system` may be a field
    learned: list[int] = []
    for i, (message, flag) in enumerate(zip(messages, beside, strict=True)):
        own = flag if (said := flag_of(message)) is None else said
        if i >= first and (message["role"] in roles if own is None else own):
            learned.append(i)
    return Turns([_shown(message) for message in messages], learned, tools_of(record))


def tools_of(record: Mapping[str, Any]) -> list[Any]:
    """The record's `tools`, which may be a list or its JSON text."""
    tools = record.get("tools") or []
    tools = (parse(tools) if tools.strip() else []) if isinstance(tools, str) else tools
    return [parse(tool) if isinstance(tool, str) else tool for tool in tools]


def _shown(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if is_plain(message):
        return message
    shown = {name: value for name, value in message.items() if name not in FLAGS}
    if shown.get("content") == []:
        shown["content"] = ""
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            call if "function" in call else {"type": "function", "function": call} for call in calls
        ]
    return for_template(shown)


def _standard(record: Mapping[str, Any]) -> Any:
    """The messages of `conversations`, with role and content; what is none of ShareGPT's stays as it is."""
    conversations = record["conversations"]
    if not isinstance(conversations, list):
        return conversations
    messages = [_standard_message(message) for message in cast("list[Any]", conversations)]
    system = record.get("system")
    if isinstance(system, str) and system and not _has_role(messages[0], "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _standard_message(message: Any) -> Any:
    if not isinstance(message, Mapping) or message.get("from") is None:
        return message
    sender, value = message["from"], message.get("value")
    others = {key: message[key] for key in message if key not in ("from", "value")}
    if not isinstance(sender, str) or sender not in ROLES:
        return {**others, "from": sender}
    standard: dict[str, Any] = {"role": ROLES[sender], "content": value, **others}
    if sender == "function_call" and isinstance(value, str):
        try:
            calls = parse(value)
        except ValueError:
            calls = value
        standard |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return standard


def _has_role(message: Any, role: str) -> bool:
    return isinstance(message, Mapping) and cast("Mapping[str, Any]", message).get("role") == role


def _problem_of_fields(record: Mapping[str, Any]) -> str:
    if record.get("chosen") is not None and record.get("rejected") is not None:
        return (
            "it is a pair (chosen and rejected), from which `uv run dpo` learns; to train on the better "
            "answer alone, rename chosen to messages or completion"
        )
    for name in ("messages", "conversations"):
        if record.get(name) == []:
            return f"its {name} is an empty list, so there is nothing to learn; leave the record out"
    nulls = sorted(key for key in record if record[key] is None)
    return (
        f"it has the fields {sorted(record)}; it needs messages, or prompt and completion, or conversations"
        + (f" (null here: {', '.join(nulls)})" if nulls else "")
    )


def _problem_of_tools(record: Mapping[str, Any]) -> str | None:
    tools = record.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, str | list):
        return f"tools is {kind_of(tools)}; it must be a list of JSON schemas, or such a list as JSON text"
    try:
        found: Any = tools_of(record)
    except ValueError as error:
        return f"tools is no JSON: {error}"
    wrong = next((tool for tool in found if not isinstance(tool, Mapping)), None)
    return (
        None if wrong is None else f"one of tools is {kind_of(wrong)}; each must be the schema of a function"
    )


def _problem_of_messages(field: str, messages: Any) -> str | None:
    if not isinstance(messages, list):
        wanted = '[{"role": "user", "content": "..."}, ...]'
        return f"{field} is {kind_of(messages)}; it must be a list of messages: {wanted}"
    for i, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, Mapping):
            return f"message {i} of {field} is {kind_of(message)}, with neither role nor content"
        if problem := _problem_of_message(cast("Mapping[str, Any]", message)):
            return f"{problem[0]} message {i} of {field}{problem[1]}".lstrip()
    return None


def _problem_of_message(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """What stands before and behind the message's number in a sentence that says what is wrong with it."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        if "from" in message and "value" not in message:
            return "", f" is from {message['from']!r}; known are {', '.join(ROLES)}"
        hint = "; name the field conversations, and it is read" if "from" in message else ""
        return "", f" has no role; its fields are {sorted(message)}{hint}"
    if problem := problem_of_flags(message):
        return "", f" ({role}) {problem}"
    calls = message.get("tool_calls")
    if calls and not _are_calls(calls):
        wanted = '[{"type": "function", "function": {"name": ..., "arguments": {...}}}]'
        return "", f" ({role}) has tool_calls that are not {wanted}"
    if isinstance(content, list):
        problem = _problem_of_parts(cast("list[Any]", content))
        return ("the content of", f" ({role}) {problem}") if problem else None
    if isinstance(content, str) or (content is None and calls):
        return None
    if content is None:
        return "", f" ({role}) has no content"
    return "the content of", f" ({role}) is {kind_of(content)}; it must be text"


def _problem_of_parts(parts: list[Any]) -> str | None:
    """Why the parts of a content are no texts; None if they are."""
    other = [part for part in parts if not is_text(part)]
    if not other:
        return None
    kind: Any = cast("Mapping[str, Any]", other[0]).get("type") if isinstance(other[0], Mapping) else None
    what = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else "a part without text"
    return f"has {what}; {PARTS.get(str(kind), TEXTS_ALONE)}"


def _are_calls(calls: Any) -> bool:
    """Whether these are calls as OpenAI writes them; the name and arguments of each may stand alone.

    Arguments are an object, or text; there may be none.
    """
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in cast("list[Any]", calls)):
        return False
    functions = [call.get("function", call) for call in cast("list[Mapping[str, Any]]", calls)]
    return all(
        isinstance(one, Mapping)
        and isinstance(one.get("name"), str)
        and (one.get("arguments") is None or isinstance(one["arguments"], str | Mapping))
        for one in functions
    )
