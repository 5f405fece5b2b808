"""Digests of conversations, by which a conversation that goes on is recognised."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from cairn.run.conversations import REASONING, Message, arguments_of, flat, is_plain

_quoted = json.encoder.encode_basestring_ascii


class Histories:
    """The digests of a conversation's leading messages. Where it goes on, only new messages are digested."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        """Copies of the messages of the last conversation."""
        self._digests = [b""]

    def of(self, messages: Sequence[Message]) -> Sequence[bytes]:
        """For each number of leading messages from 0 on, their digest; valid until the next call."""
        pairs = zip(self._messages, messages, strict=False)
        least = min(len(self._messages), len(messages))
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), least)
        del self._messages[same:], self._digests[same + 1 :]
        for message in messages[same:]:
            self._digests.append(with_message(self._digests[-1], message))
            self._messages.append(_copied(message))
        return self._digests


def _copied(value: Any) -> Any:
    """A copy that only equals what has the same digest: 1 equals True, so a number's copy equals nothing."""
    if value is None or type(value) is str:
        return value
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    if type(value) is list:
        return [_copied(one) for one in value]
    return object()


def with_message(history: bytes, message: Message) -> bytes:
    """The digest of messages and one further message, whatever way clients write it."""
    if is_plain(message) and message["content"] and type(message["role"]) is str:  # the usual case, faster
        text = f'{{"content": {_quoted(message["content"])}, "role": {_quoted(message["role"])}}}'
        return _digest(history + text.encode())
    same = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    if "content" in same:
        same["content"] = flat(same["content"])
    if message.get("role") == "assistant":
        reasoning = [same.pop(name) for name in REASONING if name in same]
        same |= {"reasoning_content": reasoning[0]} if reasoning else {}
        if calls := same.get("tool_calls"):
            same["tool_calls"] = [
                [call.get("id"), call["function"]["name"], arguments_of(call)] for call in calls
            ]
    text = json.dumps(same, sort_keys=True, default=repr)
    return _digest(history + text.encode())


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
