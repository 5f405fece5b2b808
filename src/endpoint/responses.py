"""OpenAI's responses: requests of items, answers, and the events of streamed answers."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cairn.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest, shown
from cairn.endpoint.chat_completions import ROLES, usage
from cairn.endpoint.session import Reply
from cairn.endpoint.structured import ANY_FORM

HEEDED = frozenset(
    (
        *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "stream"),
        *("max_output_tokens", "stop", "stop_token_ids"),
    )
)
"""The fields that `parse` heeds."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""The kinds of an item's content that are text."""
ORDER = ("reasoning", "message", "function_call")
"""The items of one answer: at most one reasoning, at most one message, then the calls."""


def parse(body: Any, rules: Rules) -> Asked:
    """What a request asks for.

    Raises:
        UnanswerableRequest: it is malformed, or asks for something unsupported; the message names all.
    """
    fields = rules.wanted(body, HEEDED)
    choice, parallel = fields.get("tool_choice"), fields.get("parallel_tool_calls")
    tools = fields.read(lambda: rules.tools(_schemas(fields.get("tools")), choice), None)
    before = fields.read(lambda: _instructions(fields.get("instructions")), [])
    text = fields.read(lambda: _format(fields.get("text")), None)
    return fields.checked(
        Asked(
            messages=[*before, *fields.read(lambda: _messages(fields.get("input")), [])],
            tools=tools,
            max_tokens=fields.positive("max_output_tokens"),
            stop_token_ids=fields.stop_tokens(),
            stop=fields.stops(),
            stream=fields.flag("stream"),
            form=fields.read(
                lambda: rules.form(tools, choice, parallel=parallel, text=text, name="text"), ANY_FORM
            ),
        )
    )


def _instructions(given: Any) -> list[dict[str, Any]]:
    """The message of the instructions."""
    if given is not None and not isinstance(given, str):
        raise UnanswerableRequest(f"instructions = {shown(given)}: they must be text", param="instructions")
    return [{"role": "system", "content": given}] if given else []


def _format(text: Any) -> Any:
    """The format of the text that is wanted."""
    if text is None:
        return None
    further = set(text) - {"format"} if isinstance(text, dict) else {"text"}
    if further - {"verbosity"} or (isinstance(text, dict) and text.get("verbosity") not in (None, "medium")):
        raise UnanswerableRequest(
            f"text = {shown(text)}: it may have a format, and nothing else", param="text", ignorable=True
        )
    return text.get("format")


def _schemas(tools: Any) -> Any:
    """The tools in the form of chat completions."""
    return [_schema(tool) for tool in tools] if isinstance(tools, list) else tools


def _schema(tool: Any) -> Any:
    """A function's schema in the form of chat completions."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise UnanswerableRequest(f"tools has {shown(tool)}: only functions can be called", param="tools")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages that the items make: all that the model said in one answer is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise UnanswerableRequest("input must be text, or a list of at least one item", param="input")
    messages: list[dict[str, Any]] = []
    said = len(ORDER)
    """Place in `ORDER` of the item before, if it belongs to an answer of the model."""
    for number, item in enumerate(given):
        message = _message(item, f"input[{number}]")
        place = len(ORDER)
        if message["role"] == "assistant":
            place = ORDER.index(item.get("type", "message"))
        if said < place < len(ORDER) or said == place == ORDER.index("function_call"):
            messages[-1]["content"] += message["content"]
            messages[-1].setdefault("tool_calls", []).extend(message.get("tool_calls", ()))
        else:
            messages.append(message)
        said = place
    return messages


def _message(item: Any, where: str) -> dict[str, Any]:
    """The message that one item makes.

    Raises:
        UnanswerableRequest: it is malformed, or of another kind.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in ROLES:
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": _text(item.get("content"), where)}
    if kind == "function_call_output" and isinstance(item.get("call_id"), str):
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"), where)}
    if kind == "function_call" and all(
        isinstance(item.get(n), str) for n in ("call_id", "name", "arguments")
    ):
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or "", where)
        return {"role": "assistant", "content": "", "reasoning_content": text}
    raise UnanswerableRequest(
        f"{where} = {shown(item)}: there are message, function_call, function_call_output, reasoning",
        param=where,
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnanswerableRequest(f"{where} has content {shown(content)}: it must be text", param=where)
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str)
        if not is_text:
            raise UnanswerableRequest(f"{where} has {shown(part)}: the policy reads text only", param=where)
    return "\n".join(part["text"] for part in content)


def response(reply: Reply, name: str, asked: Asked) -> dict[str, Any]:
    """The answer to a request that is not streamed; `name` is what its ids are made of."""
    counts = usage(reply)
    whole = reply.finish_reason != "length"
    return {
        **_head(name, asked),
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": _items(reply, name),
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
    }


def events(reply: Reply, name: str, asked: Asked) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, in the order of OpenAI's."""
    counter = itertools.count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(counter), **fields}

    begun = {**_head(name, asked), "status": "in_progress", "incomplete_details": None, "output": []}
    yield event("created", response={**begun, "usage": None})
    yield event("in_progress", response={**begun, "usage": None})
    for index, item in enumerate(_items(reply, name)):
        place = {"output_index": index, "item_id": item["id"]}
        yield event("output_item.added", output_index=index, item=_empty(item))
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            yield event("function_call_arguments.done", **place, arguments=arguments, name=item["name"])
        else:
            (part,) = item["content"]
            kind = part["type"]
            further = {"logprobs": []} if kind == "output_text" else {}
            place["content_index"] = 0
            yield event("content_part.added", **place, part={**part, "text": ""})
            yield event(f"{kind}.delta", **place, delta=part["text"], **further)
            yield event(f"{kind}.done", **place, text=part["text"], **further)
            yield event("content_part.done", **place, part=part)
        yield event("output_item.done", output_index=index, item=item)
    whole = response(reply, name, asked)
    yield event(whole["status"], response=whole)


def _items(reply: Reply, name: str) -> list[dict[str, Any]]:
    message, items = reply.message, list[dict[str, Any]]()
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [text]}
        )
    for number, call in enumerate(calls):
        function = call["function"]
        items.append(
            {
                "id": f"fc_{name}_{number}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
            }
        )
    return items


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item that has begun, as the first event about it shows it."""
    begun: dict[str, Any] = {**item}
    if "status" in item:
        begun["status"] = "in_progress"
    return begun | ({"arguments": ""} if item["type"] == "function_call" else {"content": []})


def _head(name: str, asked: Asked) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": 0,  # as in chat completions: no clock
        "model": MODEL_NAME,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in asked.tools or ()],
        "max_output_tokens": asked.max_tokens,
        "previous_response_id": None,
        "truncation": "disabled",
    }
