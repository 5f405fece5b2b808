"""OpenAI's chat completions: requests, answers, and the chunks of streamed answers."""

from collections.abc import Iterator, Mapping
from typing import Any

from cairn.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest, shown
from cairn.endpoint.session import Reply
from cairn.endpoint.structured import ANY_FORM
from cairn.run.conversations import REASONING

HEEDED = frozenset(
    (
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stream"),
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids"),
    )
)
"""The fields that `parse` heeds."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def parse(body: Any, rules: Rules) -> Asked:
    """What a request asks for.

    Raises:
        UnanswerableRequest: it is malformed, or asks for something unsupported; the message names all.
    """
    fields = rules.wanted(body, HEEDED)
    options, choice = fields.get("stream_options", {}), fields.get("tool_choice")
    tools = fields.read(lambda: rules.tools(fields.get("tools"), choice), None)
    wanted = {"parallel": fields.get("parallel_tool_calls"), "text": fields.get("response_format")}
    return fields.checked(
        Asked(
            messages=fields.read(lambda: _messages(fields.get("messages")), []),
            tools=tools,
            max_tokens=fields.positive("max_tokens", "max_completion_tokens"),
            stop_token_ids=fields.stop_tokens(),
            stop=fields.stops(),
            stream=fields.flag("stream"),
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            form=fields.read(lambda: rules.form(tools, choice, **wanted, name="response_format"), ANY_FORM),
        )
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise UnanswerableRequest("messages must be a list of at least one message", param="messages")
    return [_message(number, message) for number, message in enumerate(given)]


def _message(number: int, message: Any) -> dict[str, Any]:
    """A message as chat templates know it, where instructions of the developer are the system's."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise UnanswerableRequest(f"{where} must be an object with a role of {', '.join(ROLES)}", param=where)
    check_content(message.get("content"), where, may_be_empty=message["role"] in ("assistant", "tool"))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise UnanswerableRequest(
            f"{where}.tool_calls = {shown(calls)}: each must have a function's name", param=where
        )
    if message.get("function_call"):
        raise UnanswerableRequest(
            f"{where}.function_call is OpenAI's earlier form; send tool_calls", param=where
        )
    for name in (*REASONING, "name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str | None):
            raise UnanswerableRequest(
                f"{where}.{name} = {shown(message[name])}: it must be text", param=where
            )
    if message.get("content") == []:
        message = {**message, "content": ""}
    return {**message, "role": "system"} if message["role"] == "developer" else message


def check_content(content: Any, where: str, *, may_be_empty: bool = False) -> None:
    """Check that a message's content is text, or a list of texts.

    Raises:
        UnanswerableRequest: it is not.
    """
    if content is None or isinstance(content, str):
        return
    if content == [] and not may_be_empty:
        raise UnanswerableRequest(
            f"{where}.content is an empty list: send a text, or a list of texts", param=where
        )
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UnanswerableRequest(
                f"{where}.content has {shown(part)}: the policy reads text only", param=where
            )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id", ""), str | None):
        return False
    return isinstance(function.get("name"), str) and isinstance(
        function.get("arguments", ""), str | dict | None
    )


def completion(reply: Reply, name: str) -> dict[str, Any]:
    """The answer to a request that is not streamed; `name` is what its ids are made of."""
    message = {**reply.message, "refusal": None}
    message["content"] = message["content"] or (None if message.get("tool_calls") else "")
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return {**_head(name, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def chunks(reply: Reply, name: str, *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer."""
    head, message = _head(name, "chat.completion.chunk"), reply.message

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if reasoning := message.get("reasoning_content"):
        yield chunk({"reasoning_content": reasoning})
    if message["content"]:
        yield chunk({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _finish_reason(reply))
    if include_usage:
        yield {**head, "choices": [], "usage": usage(reply)}


def _head(name: str, kind: str) -> dict[str, Any]:
    # A clock would make a restarted agent's conversation differ if it keeps the time of an answer.
    return {"id": f"chatcmpl-{name}", "object": kind, "created": 0, "model": MODEL_NAME}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else reply.finish_reason


def usage(reply: Reply) -> dict[str, int]:
    """The numbers of tokens."""
    sampled = len(reply.token_ids)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": reply.prompt_tokens + sampled,
    }
