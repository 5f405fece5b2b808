"""Anthropic's messages: requests of content blocks, answers, and the events of streamed answers."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cairn.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest, shown
from cairn.endpoint.session import Reply
from cairn.endpoint.structured import ANY_FORM

HEEDED = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stop_token_ids"),
        *("stream", "output_config", "output_format"),
    )
)
"""The fields that `parse` heeds."""
BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
"""The content blocks that a message of a role may have."""


def parse(body: Any, rules: Rules) -> Asked:
    """What a request asks for.

    Raises:
        UnanswerableRequest: it is malformed, or asks for something unsupported; the message names all.
    """
    fields = rules.wanted(body, HEEDED)
    choice = fields.get("tool_choice")
    tools = fields.read(lambda: rules.tools(_schemas(fields.get("tools")), choice), None)
    system = fields.read(lambda: _system(fields.get("system")), [])
    text = fields.read(lambda: _format(fields.get("output_config"), fields.get("output_format")), None)
    return fields.checked(
        Asked(
            messages=[*system, *fields.read(lambda: _messages(fields.get("messages")), [])],
            tools=tools,
            max_tokens=fields.positive("max_tokens"),
            stop_token_ids=fields.stop_tokens(),
            stop=fields.stops("stop_sequences"),
            stream=fields.flag("stream"),
            form=fields.read(
                lambda: rules.form(tools, choice, parallel=None, text=text, name="output_config"), ANY_FORM
            ),
        )
    )


def _format(config: Any, earlier: Any) -> Any:
    """The format of the text that is wanted; `earlier` is the field in which it stood first."""
    if config is not None and (not isinstance(config, dict) or set(config) - {"format"}):
        raise UnanswerableRequest(
            f"output_config = {shown(config)}: it may have a format, and nothing else",
            param="output_config",
            ignorable=True,
        )
    return (config or {}).get("format") or earlier


def _schemas(tools: Any) -> Any:
    """The tools in the form of chat completions."""
    return [_schema(tool) for tool in tools] if isinstance(tools, list) else tools


def _schema(tool: Any) -> dict[str, Any]:
    own = isinstance(tool, dict) and tool.get("type") in (None, "custom")
    if not own or not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise UnanswerableRequest(
            f"tools has {shown(tool)}: each must have a name and an input_schema, and be called by the agent",
            param="tools",
        )
    about = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {
        "type": "function",
        "function": {name: value for name, value in about.items() if value is not None},
    }


def _system(given: Any) -> list[dict[str, Any]]:
    """The system's message."""
    text = _text(_blocks(given, "system", "system")) if given else ""
    return [{"role": "system", "content": text}] if text else []


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages that content blocks make: each result of a tool is one of its own."""
    if not isinstance(given, list) or not given:
        raise UnanswerableRequest("messages must be a list of at least one message", param="messages")
    messages: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    """The names of the functions that were called, by the ids of the calls."""
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in BLOCKS:
            raise UnanswerableRequest(
                f"{where} must be an object with a role of {', '.join(BLOCKS)}", param=where
            )
        blocks = _blocks(message.get("content"), role, where)
        if role == "assistant":
            messages.append(_said(blocks))
            called |= {block["id"]: block["name"] for block in blocks if block["type"] == "tool_use"}
        else:
            messages += _told(role, blocks, called, where)
    if messages and messages[-1]["role"] == "assistant":
        raise UnanswerableRequest(
            "messages must not end with the assistant's: the endpoint begins answers, and continues none",
            param="messages",
        )
    return messages


def _blocks(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The content blocks of a message.

    Raises:
        UnanswerableRequest: one is malformed, or of a kind that a message of this role can't have here.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or (not content and role != "assistant"):
        what = "an empty list" if content == [] else shown(content)
        raise UnanswerableRequest(
            f"{where} has content {what}: send a text, or a list of blocks", param=where
        )
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in BLOCKS[role]:
            kinds = ", ".join(BLOCKS[role])
            raise UnanswerableRequest(
                f"{place} = {shown(block)}: the policy reads text only ({kinds})", param=place
            )
        needed: dict[str, type] = {
            "text": {"text": str},
            "thinking": {"thinking": str},
            "tool_use": {"id": str, "name": str, "input": dict},
            "tool_result": {"tool_use_id": str},
        }[kind]
        for name, wanted in needed.items():
            if not isinstance(block.get(name), wanted):
                what = "an object" if wanted is dict else "text"
                raise UnanswerableRequest(
                    f"{place}.{name} = {shown(block.get(name))}: it must be {what}", param=place
                )
    return content


def _text(blocks: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _said(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A message of the model's."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["input"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return message


def _told(
    role: str, blocks: Sequence[Mapping[str, Any]], called: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    """The messages that the model reads: texts beside each other are one."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else _text(_blocks(content, "system", where))
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
            if name := called.get(block["tool_use_id"]):
                messages[-1]["name"] = name
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + block["text"]
        else:
            messages.append({"role": role, "content": block["text"]})
    return messages


def answer(reply: Reply, name: str, asked: Asked) -> dict[str, Any]:
    """The answer to a request that is not streamed; `name` is what its ids are made of."""
    named = reply.stop is not None and reply.stop in asked.stop
    by_stop = "stop_sequence" if named else "end_turn"
    reason = "max_tokens" if reply.finish_reason == "length" else by_stop
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": MODEL_NAME,
        "content": _content(reply),
        "stop_reason": "tool_use" if reply.message.get("tool_calls") else reason,
        "stop_sequence": reply.stop if named else None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": len(reply.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _content(reply: Reply) -> list[dict[str, Any]]:
    message, blocks = reply.message, list[dict[str, Any]]()
    if reasoning := message.get("reasoning_content"):
        signature = hashlib.blake2b(reasoning.encode(errors="replace"), digest_size=16).hexdigest()
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": json.loads(function["arguments"]),
            }
        )
    return blocks


def events(reply: Reply, name: str, asked: Asked) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, in the order of Anthropic's."""
    whole = answer(reply, name, asked)
    usage = {**whole["usage"], "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, deltas = {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        elif block["type"] == "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        else:
            empty = {"input": {}}
            written = json.dumps(block["input"], ensure_ascii=False)
            deltas = [{"type": "input_json_delta", "partial_json": written}]
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def error(refused: UnanswerableRequest) -> dict[str, Any]:
    """An error as Anthropic's clients know it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = "api_error" if refused.status >= 500 else kinds.get(refused.status, "invalid_request_error")
    too_long = refused.code == "context_length_exceeded"  # which agents that summarise look for in the text
    message = f"prompt is too long: {refused}" if too_long else str(refused)
    return {"type": "error", "error": {"type": kind, "message": message}}
