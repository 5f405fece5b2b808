"""What a record must hold to be trained on."""

from collections.abc import Mapping
from typing import Any

from cairn.run.data_sets import kind_of


def problem_of(record: Mapping[str, Any]) -> str | None:
    """Why a record can't be trained on, or None."""
    messages, prompt, completion = (record.get(key) for key in ("messages", "prompt", "completion"))
    if messages:
        return _problem_of_messages("messages", messages)
    if prompt is None or completion is None:
        return f"it has the fields {sorted(record)}; it needs messages, or prompt and completion" + (
            f" (null here: {', '.join(sorted(key for key in record if record[key] is None))})"
            if any(value is None for value in record.values())
            else ""
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return None
    if isinstance(prompt, str) or isinstance(completion, str):
        return "prompt and completion must both be text, or both lists of messages"
    return _problem_of_messages("prompt", prompt) or _problem_of_messages("completion", completion)


def _problem_of_messages(field: str, messages: Any) -> str | None:
    if not isinstance(messages, list):
        wanted = '[{"role": "user", "content": "..."}, ...]'
        return f"{field} is {kind_of(messages)}; it must be a list of messages: {wanted}"
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"message {i} of {field} is {kind_of(message)}, with neither role nor content"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            return f"message {i} of {field} has no role; its fields are {sorted(message)}"
        if isinstance(content, str | list) or (content is None and message.get("tool_calls")):
            continue
        if content is None:
            return f"message {i} of {field} ({role}) has no content"
        return f"the content of message {i} of {field} ({role}) is {kind_of(content)}; it must be text"
    return None
