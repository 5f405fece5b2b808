"""What agents send to the endpoint: Anthropic's messages, forms of answers, several faults, any JSON."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runs import DEADLINE
from templates import write_chat
from test_endpoint import HELLO, TOOLS, Scripted, assembled, run, served

from cairn.endpoint import (
    Asked,
    Rules,
    UnanswerableRequest,
    chat_completions,
    messages,
    responses,
)
from cairn.endpoint.asked import DEEPEST, check_values, read_body
from cairn.endpoint.structured import AnswerFormat, form_of
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.conversation import Conversation
from cairn.orchestrator.environments import Reply

RULES, CHECKING = Rules(1.0), Rules(1.0, structured="check")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


@contextlib.asynccontextmanager
async def asking(model: Any, rules: Rules = RULES, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client with the session's key, as Anthropic's clients send it."""
    async with served(model, rules) as (client, _, endpoint):
        given_headers = {"x-api-key": str(client.api_key), "anthropic-version": "2023-06-01", **headers}
        url = endpoint.url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=url, headers=given_headers, timeout=DEADLINE) as http:
            yield http


# All faults at once


def test_all_that_is_refused_is_told_at_once():
    body = {
        "messages": [{"role": "user", "content": []}],
        "temperature": 0.2,
        "n": 2,
        "stop": [3],
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 0,
        "stream": "yes",
        "verbosity": "low",
        "model": "gpt-4o",
    }
    with pytest.raises(UnanswerableRequest) as refused:
        chat_completions.parse(body, RULES)
    text = str(refused.value)
    for name in ("temperature = 0.2", "n = 2", "stop = [3]", 'tool_choice = "required"', "max_tokens = 0"):
        assert name in text
    for name in (
        'stream = "yes"',
        'verbosity = "low"',
        'model = "gpt-4o"',
        "messages[0].content is an empty list",
    ):
        assert name in text
    assert text.count("orchestrator.environment.args.ignore") == 1
    for name in ("temperature", "n", "tool_choice", "verbosity", "model"):
        assert f"'{name}'" in text[text.index("or add") :]
    assert "'max_tokens'" not in text[text.index("or add") :]  # no value of it helps anybody
    assert refused.value.status == 400
    ignored = {"temperature", "n", "tool_choice", "verbosity", "model"}
    body |= {"messages": HELLO, "stop": "x", "max_tokens": 3, "stream": False}
    assert chat_completions.parse(body, Rules(1.0, ignore=ignored)) == Asked(
        HELLO, TOOLS, max_tokens=3, stop=("x",)
    )


def test_one_fault_is_told_alone():
    with pytest.raises(
        UnanswerableRequest, match=r"^n = 2: each .*; leave n out, or add 'n' to ignore \(orch[a-z.]*\)$"
    ):
        chat_completions.parse({"messages": HELLO, "n": 2}, RULES)
    with pytest.raises(UnanswerableRequest) as refused:
        chat_completions.parse({"messages": HELLO, "model": "gpt-4o"}, RULES)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_stop_strings_of_each_api():
    assert chat_completions.parse({"messages": HELLO, "stop": "a"}, RULES).stop == ("a",)
    assert chat_completions.parse({"messages": HELLO, "stop": ["a", "b", "a"]}, RULES).stop == ("a", "b")
    assert chat_completions.parse({"messages": HELLO, "stop": []}, RULES).stop == ()
    assert responses.parse({"input": "a", "stop": ["b"]}, RULES).stop == ("b",)
    assert messages.parse({"messages": HELLO, "stop_sequences": ["\n\nHuman:"]}, RULES).stop == (
        "\n\nHuman:",
    )


def test_content_that_is_empty_or_no_text_is_named():
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = {"role": "assistant", "content": [], "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": []}
    parsed = chat_completions.parse({"messages": [*HELLO, said, result]}, RULES).messages
    assert [one["content"] for one in parsed[1:]] == ["", ""]
    for message, what in (
        ({"role": "user", "content": []}, "messages[0].content is an empty list"),
        (
            {"role": "tool", "content": "a", "tool_call_id": [1]},
            "messages[0].tool_call_id = [1]: it must be text",
        ),
        ({"role": "assistant", "reasoning_content": 3}, "messages[0].reasoning_content = 3"),
    ):
        with pytest.raises(UnanswerableRequest) as refused:
            chat_completions.parse({"messages": [message]}, RULES)
        assert what in str(refused.value)


# Forms of answers


def said(content: str = "", *calls: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{"function": {"name": name, "arguments": "{}"}} for name in calls]
    return message


NAMED = {"type": "function", "function": {"name": "add"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "required": ({"tool_choice": "required"}, [said("", "add"), said("x", "sub", "add")], [said("{}")]),
    "any": ({"choice": {"type": "any"}}, [said("", "add")], [said("no")]),
    "a function": ({"tool_choice": NAMED}, [said("", "add", "add")], [said("a"), said("", "sub")]),
    "a function of a response": (
        {"tool_choice": {"type": "function", "name": "add"}},
        [said("", "add")],
        [said()],
    ),
    "a tool": ({"choice": {"type": "tool", "name": "add"}}, [said("", "add")], [said("", "sub")]),
    "one call": ({"parallel_tool_calls": False}, [said("a"), said("", "add")], [said("", "add", "add")]),
    "one call of Anthropic's": (
        {"choice": {"type": "auto", "disable_parallel_tool_use": True}},
        [said("", "add")],
        [said("", "add", "add")],
    ),
    "json": (
        {"response_format": {"type": "json_object"}},
        [said("{}"), said(' {"a": [1]}\n'), said("no", "add")],
        [said("[1]"), said("no"), said("{"), said(""), said("```json\n{}\n```")],
    ),
    "schema": (
        {"response_format": JSON_SCHEMA},
        [said('{"a": 3}'), said("", "add")],
        [said('{"a": "3"}'), said("{}"), said("3"), said("[" * 10**5)],
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_an_answer_in_a_form_is_refused_or_checked_as_the_settings_say(case: str):
    changed, fits, misfits = FORMS[case]
    changed = {"tool_choice" if name == "choice" else name: value for name, value in changed.items()}
    body = {
        "messages": HELLO,
        "tools": [TOOLS[0], {"type": "function", "function": {"name": "sub"}}],
        **changed,
    }
    with pytest.raises(UnanswerableRequest, match=r"no grammar has masked; with structured = 'check' \(orch"):
        chat_completions.parse(body, RULES)
    form = chat_completions.parse(body, CHECKING).form
    assert [form.misfit(message) for message in fits] == [None] * len(fits)
    assert all(form.misfit(message) for message in misfits)


@pytest.mark.parametrize("rules", [RULES, CHECKING])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tool_choice": "sometimes"}, "it must be auto, none, required, or name a function"),
        ({"tool_choice": ["auto"]}, "it must be auto, none"),
        ({"tool_choice": {"type": "function"}}, "it must be auto, none"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no such tool, only add"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "send only the tools that may be called",
        ),
        ({"tool_choice": "required", "tools": []}, "the request has no tools"),
        ({"parallel_tool_calls": 0}, "it must be true or false"),
        ({"response_format": "json"}, "its type must be text, json_object or json_schema"),
        ({"response_format": {"type": "grammar"}}, "its type must be text"),
        ({"response_format": {"type": "json_schema"}}, "it has no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
            "its schema is none",
        ),
    ],
)
def test_forms_that_mean_nothing(rules: Rules, changed: dict[str, Any], message: str):
    with pytest.raises(UnanswerableRequest, match=message):
        chat_completions.parse({"messages": HELLO, "tools": TOOLS, **changed}, rules)


def test_what_restricts_nothing_is_accepted_everywhere():
    for changed in (
        {"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"tool_choice": None},
    ):
        assert chat_completions.parse({"messages": HELLO, "tools": TOOLS, **changed}, RULES) == Asked(
            HELLO, TOOLS
        )
    without = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}
    assert chat_completions.parse(without, RULES) == Asked(HELLO)
    assert (
        messages.parse({"messages": HELLO, "tools": [ADD], "tool_choice": {"type": "none"}}, RULES).tools
        is None
    )
    assert (
        messages.parse({"messages": HELLO, "tools": [ADD], "tool_choice": {"type": "auto"}}, RULES).form
        == AnswerFormat()
    )


def test_a_schema_that_refers_to_itself_or_elsewhere_is_a_misfit_and_fetches_nothing():
    for schema in (
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ):
        form = form_of(None, None, parallel=None, text={"type": "json_schema", "schema": schema}, name="text")
        assert "its schema can't be followed" in str(form.misfit(said("{}")))


def test_answers_of_another_form_reach_the_agent_and_are_counted():
    async def test() -> None:
        model = Scripted()
        async with served(model, CHECKING) as (client, session, _):
            for fmt in (JSON_SCHEMA, {"type": "text"}, {"type": "json_object"}):
                answer = await client.chat.completions.create(
                    model="policy", messages=HELLO, response_format=fmt, extra_body={"seed": len(model.asked)}
                )
                assert answer.choices[0].message.content == f"7 {len(model.asked) - 1}"
            assert len(session.misfits) == 2
            assert session.misfits[0] == "its content was to be JSON and is not"

    run(test())


# Anthropic's messages


def test_messages_become_the_same_conversation_as_in_chat_completions():
    body = {
        "model": "policy",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"},
        "tools": [{**ADD, "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "disabled"},
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1.5}},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "c"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "d"},
                    {"type": "text", "text": "e"},
                ],
            },
        ],
    }
    asked = messages.parse(body, RULES)
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for name, arguments in (("t1", '{"a": 1.5}'), ("t2", "{}"))
    ]
    assert asked == Asked(
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "c", "name": "add"},
            {"role": "tool", "tool_call_id": "t2", "content": "", "name": "add"},
            {"role": "user", "content": "d\ne"},
        ],
        tools=TOOLS,
        max_tokens=50,
    )
    plain = messages.parse({"system": "Be kind.", "messages": HELLO}, RULES)
    assert plain.messages == [{"role": "system", "content": "Be kind."}, *HELLO]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"messages": []}, "messages must be a list of at least one message"),
    "role": (
        {"messages": [{"role": "tool", "content": "a"}]},
        r"messages\[0\] must be an object with a role",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        r"messages\[0\].content\[0\] = .*the policy reads text only",
    ),
    "redacted": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            ]
        },
        "text, thinking, tool_use",
    ),
    "call": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]},
            ]
        },
        r"messages\[1\].content\[0\].input = null: it must be an object",
    ),
    "empty": ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\] has content an empty list"),
    "no text": ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\] has content 3"),
    "prefill": (
        {"messages": [*HELLO, {"role": "assistant", "content": "{"}]},
        "the endpoint begins answers, and continues none",
    ),
    "server tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "must have a name and an input_schema, and be called by the agent",
    ),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "decided by its chat template"),
    "top_k": ({"top_k": 5}, "own distribution"),
    "temperature": ({"temperature": 0.0}, "its temperature is 1"),
    "stop": ({"stop_sequences": [""]}, "stop_sequences = .*an empty text"),
    "tool_choice": ({"tools": [ADD], "tool_choice": {"type": "any"}}, "no grammar has masked"),
    "schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config = .*no grammar has masked",
    ),
    "effort": ({"output_config": {"effort": "high"}}, "it may have a format, and nothing else"),
    "context": ({"context_management": {"edits": []}}, "the endpoint does not know this field"),
    "system": ({"system": [{"type": "image"}]}, "the policy reads text only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_messages_that_are_refused(case: str):
    changed, message = REFUSED[case]
    with pytest.raises(UnanswerableRequest, match=message):
        messages.parse({"messages": HELLO, "max_tokens": 9, **changed}, RULES)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_in_anthropics_form(stream: bool):
    async def test() -> None:
        async with asking(Scripted()) as http:

            async def ask(**settings: Any) -> dict[str, Any]:
                body = {"model": "policy", "max_tokens": 50, "messages": HELLO, "stream": stream, **settings}
                found = await http.post("/v1/messages?beta=true", json=body)
                assert found.status_code == 200
                return assembled(found.text) if stream else found.json()

            whole = await ask()
            thinking, text = whole["content"]
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
            assert thinking["signature"]
            assert text == {"type": "text", "text": "7 0"}
            assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "policy")
            assert whole["id"].startswith("msg_")
            assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
            assert whole["usage"]["input_tokens"] == 5
            assert whole["usage"]["output_tokens"] == 3
            called = await ask(tools=[ADD])
            assert called["stop_reason"] == "tool_use"
            assert called["content"][-1] == {
                "type": "tool_use",
                "id": "call0",
                "name": "add",
                "input": {"a": 1},
            }
            assert (await ask(max_tokens=3))["stop_reason"] == "max_tokens"
            stopped = await ask(stop_sequences=["a", "b"])
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "b")

    run(test())


def test_the_events_of_a_streamed_message_come_in_anthropics_order():
    message = {
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}],
    }
    kinds = [event["type"] for event in messages.events(Reply("a", (1,), "stop", message, 2), "x", Asked([]))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == [
        "message_start",
        *(block[0], block[1], block[1], block[2]),  # the reasoning's signature is a delta of its own
        *block,
        *block,
        *("message_delta", "message_stop"),
    ]
    stopped = messages.answer(Reply("a", (1,), "stop", {"content": ""}, 2, stop="of the run"), "x", Asked([]))
    assert (stopped["stop_reason"], stopped["stop_sequence"], stopped["content"]) == ("end_turn", None, [])


def test_errors_and_keys_of_anthropics_clients():
    async def test() -> None:
        model = Scripted()
        async with asking(model) as http:
            body = {"model": "policy", "max_tokens": 9, "messages": HELLO}
            counted = await http.post(
                "/v1/messages/count_tokens", json={**body, "tools": [ADD], "system": "s"}
            )
            assert counted.json() == {"input_tokens": 21}
            assert not model.asked
            for change, status, kind, text in (
                ({"model": "claude"}, 404, "not_found_error", "the only model here is 'policy'"),
                ({"top_p": 0.5, "top_k": 3}, 400, "invalid_request_error", "(2) top_k = 3"),
                (
                    {"messages": [{"role": "user", "content": "full"}]},
                    *(400, "invalid_request_error", "prompt is too long"),
                ),
                (
                    {"messages": [{"role": "user", "content": "template"}]},
                    *(400, "invalid_request_error", "the chat template fails"),
                ),
            ):
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    if path.endswith("tokens") and "messages" in change:
                        continue
                    found = await http.post(path, json=body | change)
                    assert found.status_code == status
                    error = found.json()
                    assert (error["type"], error["error"]["type"]) == ("error", kind)
                    assert text in error["error"]["message"]
                    assert found.headers["x-should-retry"] == "false"
            nobody = await http.post("/v1/messages", json=body, headers={"x-api-key": "cairn-else"})
            assert (nobody.status_code, nobody.json()["error"]["type"]) == (401, "authentication_error")
            key = http.headers["x-api-key"]
            by_token = {"x-api-key": "", "Authorization": f"Bearer {key}"}
            assert (await http.post("/v1/messages", json=body, headers=by_token)).status_code == 200
            (listed,) = (await http.get("/v1/models")).json()["data"]
            assert (listed["id"], listed["type"]) == ("policy", "model")

    run(test())


def test_a_message_that_the_client_sends_again_is_one_turn():
    async def test() -> None:
        model = Scripted()
        async with asking(model) as http:
            body = {"model": "policy", "max_tokens": 9, "messages": HELLO}
            first = await http.post("/v1/messages", json=body)
            again = await http.post("/v1/messages", json=body, headers={"x-stainless-retry-count": "1"})
            another = await http.post("/v1/messages", json=body)
            assert first.json() == again.json() != another.json()
            assert len(model.asked) == 2

    run(test())


# Any body


DEEP = b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
BODIES = {
    "deep lists": (DEEP, f"more than {DEEPEST} lists and objects in each other"),
    "deep objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, f"more than {DEEPEST} lists"),
    "unclosed": (b"[" * 100_000, f"more than {DEEPEST} lists"),
    "no JSON": (b"{", "the body is not JSON"),
    "no text": (b"\xff\xfe\xff", "the body is not JSON"),
    "nothing": (b"", "the body is not JSON"),
    "a list": (b"[]", "the body must be a JSON object"),
    "not finite": (
        b'{"messages": [{"role": "user", "content": NaN}]}',
        r"messages[0].content is a number that is",
    ),
    "too large": (b'{"max_tokens": 1e999}', "max_tokens is a number that is not finite"),
    "too many digits": (b'{"max_tokens": ' + b"1" * 5000 + b"}", "the body is not JSON"),
    "half a pair": (
        b'{"messages": [{"role": "user", "content": "ab\\ud83d"}]}',
        r"messages[0].content has half of a surrogate pair at character 2 (\ud83d)",
    ),
    "half a pair in a name": (b'{"messages": [{"\\udc00": 1}]}', "a name in messages[0] has half"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_no_requests(path: str, case: str):
    content, message = BODIES[case]

    async def test() -> None:
        async with asking(Scripted()) as http:
            found = await http.post(path, content=content)
            assert found.status_code == 400
            assert message in found.json()["error"]["message"]
            assert found.headers["x-should-retry"] == "false"

    run(test())


def test_a_body_of_the_greatest_depth_is_read():
    deepest: Any = "x"
    for _ in range(DEEPEST):
        deepest = [deepest]
    assert read_body(json.dumps(deepest).encode()) == deepest
    with pytest.raises(UnanswerableRequest, match="send a flatter one"):
        check_values([deepest])


class Rendering(Scripted):
    """Reads the conversation as a rollout does, and says nothing of its own."""

    def __init__(self, chat: ChatFormat):
        super().__init__()
        self.chat = chat
        self.conversation = Conversation(chat, {}.__getitem__)

    async def generate(self, messages: Any, *, tools: Any = None, **_: Any) -> Reply:
        context = Conversation(self.chat, {}.__getitem__).next(messages, tools)
        return Reply("a", (1,), "stop", {"role": "assistant", "content": "a"}, len(context.token_ids))

    async def count_tokens(self, messages: Any, *, tools: Any = None) -> int:
        return len(self.chat.prompt(messages, tools))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_KINDS = st.sampled_from(
    [
        *("text", "function", "tool_use", "tool_result", "thinking", "message", "function_call", "reasoning"),
        *(
            "function_call_output",
            "json_schema",
            "json_object",
            "any",
            "tool",
            "auto",
            "disabled",
            "input_text",
        ),
    ]
)
_NAMES = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "function", "arguments", "id", "tool_calls", "input"),
        *("tool_use_id", "tool_call_id", "call_id", "output", "thinking", "reasoning_content", "summary"),
        *("parameters", "input_schema", "description", "format", "schema", "json_schema", "refusal"),
    ]
)
_ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
_PARTS = st.recursive(
    _VALUES | _KINDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"type": _KINDS}, optional={"text": _VALUES, "input": inner, "content": inner}
        )
        | st.fixed_dictionaries({"role": _ROLES, "content": inner})
        | st.dictionaries(_NAMES, inner, max_size=5)
    ),
    max_leaves=10,
)
_FIELDS = sorted(
    chat_completions.HEEDED | responses.HEEDED | messages.HEEDED | {"model", "top_p", "metadata"}
)
_GOOD: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
    {"input": "Hi"},
)
"""Bodies that an endpoint answers."""
_BODIES = _VALUES | st.dictionaries(st.sampled_from(_FIELDS), _PARTS | _VALUES, max_size=6).flatmap(
    lambda body: st.fixed_dictionaries(
        {
            **{name: st.just(value) for name, value in body.items()},
            "messages": st.lists(
                st.fixed_dictionaries({"role": _ROLES}, optional={"content": _PARTS}), max_size=3
            ),
            "input": _PARTS,
        }
    )
)
_NEAR = st.builds(
    lambda good, changed: {**good, **changed},
    st.sampled_from(_GOOD),
    st.dictionaries(st.sampled_from(_FIELDS), _PARTS | _VALUES, max_size=1),
)
"""Bodies that differ from one that is answered by at most one field."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return write_chat(tmp_path_factory.mktemp("chat"), "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("rules", [RULES, CHECKING], ids=["refuse", "check"])
def test_no_body_is_the_endpoints_failure(chat: ChatFormat, rules: Rules):
    """Whatever is sent is answered, or refused as a fault of the request; never with a 5xx, or twice."""
    seen: set[int] = set()
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
    loop = asyncio.new_event_loop()
    context = asking(Rendering(chat), rules)
    http = loop.run_until_complete(context.__aenter__())

    @given(body=_BODIES | _NEAR, path=st.sampled_from(paths))
    @example(body=_GOOD[0], path=paths[0])
    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    def send(body: Any, path: str) -> None:
        content = json.dumps(body).encode()
        found = loop.run_until_complete(http.post(path, content=content))
        assert found.status_code in (200, 400, 404), found.text
        seen.add(found.status_code)
        if found.status_code != 200:
            assert found.json()["error"]["message"]
            assert found.headers["x-should-retry"] == "false"

    try:
        send()
        assert {200, 400} <= seen
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()
