"""The endpoint for agents that know only a URL, driven by OpenAI's own client."""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import draws
import httpx
import openai
import pytest
from errands import Servers
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent
from runs import DEADLINE
from test_programs import Power, complete, digest, runner

from cairn.endpoint import (
    Asked,
    Rules,
    Session,
    UnanswerableRequest,
    chat_completions,
    responses,
)
from cairn.endpoint.server import Endpoint
from cairn.orchestrator.environments import Reply
from cairn.run.conversations import NoPrompt

RULES = Rules(1.0)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
CALL = {"id": "call0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class Scripted:
    """A model that says "<seed> <number of the call>", with reasoning, and with a tool's call if it may."""

    def __init__(self, seed: int = 7):
        self.seed = seed
        self.asked: list[Asked] = []
        self.open = asyncio.Event()
        self.open.set()

    async def generate(
        self,
        messages: Any,
        *,
        tools: Any = None,
        max_tokens: int | None = None,
        stop_token_ids: Any = (),
        stop: Any = (),
    ) -> Reply:
        said = f"{self.seed} {len(self.asked)}"
        self.asked.append(Asked(messages, tools, max_tokens, stop_token_ids, stop=tuple(stop)))
        await self.open.wait()
        if messages[-1]["content"] == "template":
            raise NoPrompt("the chat template fails on its messages: no")
        message = {"role": "assistant", "content": said, "reasoning_content": "hm"}
        if tools:
            message["tool_calls"] = [CALL]
        tokens = () if messages[-1]["content"] == "full" else (1, 2, 3)
        end = "length" if max_tokens == 3 else "stop"
        return Reply(said, tokens, end, message, 5, stop=stop[-1] if stop and end == "stop" else None)

    async def count_tokens(self, messages: Any, *, tools: Any = None) -> int:
        return 10 * len(messages) + len(tools or ())

    async def once(self, name: str, call: Callable[[], Any]) -> Any:
        raise NotImplementedError


@contextlib.asynccontextmanager
async def served(
    model: Scripted, rules: Rules = RULES
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Session, Endpoint]]:
    """A client of a session with a model."""
    endpoint = Endpoint()
    await endpoint.start()
    try:
        async with (
            endpoint.session(model, rules) as (key, session),
            openai.AsyncOpenAI(base_url=endpoint.url, api_key=key) as client,
        ):
            yield client, session, endpoint
    finally:
        await endpoint.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(DEADLINE):
            await test

    asyncio.run(in_time())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# The four ways to ask; each returns the answer's message


async def chat(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="policy", messages=messages, **settings)
    return answer.choices[0].message.model_dump()


async def chat_stream(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> dict[str, Any]:
    async with client.chat.completions.stream(model="policy", messages=messages, **settings) as stream:
        async for _ in stream:
            pass
        return stream.current_completion_snapshot.choices[0].message.model_dump()


def as_message(items: list[Any]) -> dict[str, Any]:
    """The message that the items of an answer make when they are sent back."""
    (message,) = responses.parse({"input": [item.model_dump() for item in items]}, RULES).messages
    return dict(message)


async def response(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> dict[str, Any]:
    answer = await client.responses.create(model="policy", input=messages, **settings)
    return as_message(answer.output)


async def response_stream(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> dict[str, Any]:
    async with client.responses.stream(model="policy", input=messages, **settings) as stream:
        *_, last = [event async for event in stream]
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    return as_message(last.response.output)


async def of_anthropic(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """As a client of Anthropic's API does it, which hands back the blocks that it got."""
    body = {
        "model": "policy",
        "messages": [{"role": one["role"], "content": one.get("blocks", one["content"])} for one in messages],
        "stream": stream,
    }
    found = await client.post("/messages", body=body, cast_to=httpx.Response)
    blocks = assembled(found.text)["content"] if stream else found.json()["content"]
    return {"role": "assistant", "content": blocks[-1]["text"] if blocks else "", "blocks": blocks}


async def message(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    return await of_anthropic(client, messages, stream=False)


async def message_stream(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    return await of_anthropic(client, messages, stream=True)


def assembled(lines: str) -> dict[str, Any]:
    """The message that the events of a streamed answer make, read as Anthropic's clients do."""
    whole: dict[str, Any] = {}
    for event in (json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: ")):
        kind = event["type"]
        if kind == "message_start":
            whole = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(whole["content"])
            whole["content"].append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            block, delta = whole["content"][event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                block[name] = block.get(name, "") + delta.get(name, "") if name in delta else block.get(name)
            block["json"] += delta.get("partial_json", "")
        elif kind == "content_block_stop":
            block = whole["content"][event["index"]]
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(written)
            whole["content"][event["index"]] = {k: v for k, v in block.items() if v is not None}
        elif kind == "message_delta":
            whole |= event["delta"]
            whole["usage"] |= event["usage"]
    assert kind == "message_stop"
    return whole


WAYS = {one.__name__: one for one in (chat, chat_stream, response, response_stream)}
ALL_WAYS = {**WAYS, **{one.__name__: one for one in (message, message_stream)}}


@pytest.mark.parametrize("way", WAYS)
def test_answers_reach_openais_client_whole(way: str):
    """With reasoning, and with calls of tools if the model may make some."""

    async def test() -> None:
        model = Scripted()
        tools = TOOLS
        if way.startswith("response"):
            tools = [{"type": "function", **TOOLS[0]["function"]}]
        async with served(model) as (client, session, _):
            plain = await WAYS[way](client, HELLO)
            calling = await WAYS[way](client, HELLO, tools=tools)
            silent = await WAYS[way](client, HELLO, tools=tools, tool_choice="none")
        for message, said in ((plain, "7 0"), (calling, "7 1"), (silent, "7 2")):
            assert (message["role"], message["content"]) == ("assistant", said)
            assert message["reasoning_content"] == "hm"
        assert not plain.get("tool_calls")
        assert not silent.get("tool_calls")
        (call,) = calling["tool_calls"]
        assert (call["id"], call["function"]["name"]) == ("call0", "add")
        assert call["function"]["arguments"] == CALL["function"]["arguments"]
        assert [asked.tools for asked in model.asked] == [None, TOOLS, None]
        assert [list(asked.messages) for asked in model.asked] == [HELLO] * 3
        assert session.conversation[-1]["content"] == "7 2"

    run(test())


def test_lengths_and_usage():
    async def test() -> None:
        model = Scripted()
        async with served(model) as (client, _, _):
            settings: dict[str, Any] = {"model": "policy", "messages": HELLO}
            cut = await client.chat.completions.create(**settings, max_tokens=5, max_completion_tokens=3)
            assert cut.choices[0].finish_reason == "length"
            assert cut.usage is not None
            assert (cut.usage.prompt_tokens, cut.usage.completion_tokens) == (5, 3)
            options: Any = {"include_usage": True}
            stream = await client.chat.completions.create(**settings, stream=True, stream_options=options)
            *_, last = [chunk async for chunk in stream]
            assert (last.choices, last.usage and last.usage.total_tokens) == ([], 8)
            cut = await client.responses.create(model="policy", input="a", max_output_tokens=3)
            assert cut.incomplete_details is not None
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            extra: Any = {"stop_token_ids": [9]}
            instructed = await client.responses.create(
                model="policy", input="b", instructions="Be kind.", extra_body=extra
            )
            assert (instructed.status, instructed.output_text) == ("completed", "7 3")
        assert [asked.max_tokens for asked in model.asked] == [3, None, 3, None]
        assert model.asked[-1].stop_token_ids == (9,)
        assert model.asked[-1].messages[0] == {"role": "system", "content": "Be kind."}

    run(test())


def test_the_events_of_a_streamed_response_come_in_openais_order():
    async def test() -> None:
        model = Scripted()
        tool: Any = {"type": "function", **TOOLS[0]["function"]}
        async with served(model) as (client, _, _):
            stream = await client.responses.create(model="policy", input="a", tools=[tool], stream=True)
            seen = [event async for event in stream]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
        call = ["function_call_arguments.delta", "function_call_arguments.done"]
        around = ["output_item.added", "output_item.done"]
        wanted = ["created", "in_progress"]
        for inside in (
            [one.format("reasoning_text") for one in text],
            [one.format("output_text") for one in text],
        ):
            wanted += [around[0], *inside, around[1]]
        wanted += [around[0], *call, around[1], "completed"]
        assert [event.type for event in seen] == [f"response.{name}" for name in wanted]

    run(test())


# What is refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": (
        {"temperature": 0.5},
        r"temperature = 0.5: training needs .* its temperature is 1; leave",
    ),
    "top_k": ({"top_k": 50}, r"top_k = 50: training needs answers from the run's own distribution"),
    "min_p": ({"min_p": 0.1}, r"min_p = 0.1: training needs answers from the run's own distribution"),
    "top_p": ({"top_p": 0.9}, r"top_p = 0.9: training needs answers from the run's own distribution"),
    "n": ({"n": 2}, "n = 2: each request gets one answer"),
    "n of another kind": ({"n": True}, "n = true: each request"),
    "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias = .* own distribution"),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        "response_format = .* own distribution",
    ),
    "stop": ({"stop": [""]}, "stop = .*an empty text would end every answer"),
    "stop of another kind": ({"stop": {"a": 1}}, "stop = .*give a text, or a list of texts"),
    "logprobs": ({"logprobs": True}, "logprobs = true: the endpoint returns no logprobs"),
    "tool_choice": (
        {"tools": TOOLS, "tool_choice": "required"},
        r'tool_choice = "required": training needs .* no grammar has masked; with structured = .check.',
    ),
    "functions": ({"functions": [{}]}, "functions = .*earlier form"),
    "unknown": ({"reasoning_effort": "high"}, 'reasoning_effort = "high": the endpoint does not know'),
    "model": ({"model": "gpt-4o"}, "the only model here is 'policy'"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens = 0: it must be a whole number from 1 on"),
    "stream": ({"stream": "yes"}, 'stream = "yes": it must be true or false'),
    "tools": ({"tools": [{"name": "add"}]}, "tools must be a list of"),
    "stop_token_ids": ({"stop_token_ids": ["a"]}, "they must be token ids"),
    "no messages": ({"messages": []}, "messages must be a list"),
    "no role": ({"messages": [{"content": "a"}]}, r"messages\[0\] must be an object with a role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        r"messages\[0\].content has .*the policy reads text only",
    ),
    "call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "each must have a function's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_distribution_or_is_malformed_is_refused(case: str):
    """With the field, its value and what to do; nothing is sampled."""
    changed, message = REFUSED[case]
    with pytest.raises(UnanswerableRequest, match=message) as refused:
        chat_completions.parse({"messages": HELLO, "model": "policy", **changed}, RULES)
    assert refused.value.param


REFUSED_RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "previous": ({"previous_response_id": "resp_1"}, "the endpoint keeps no conversations; send all items"),
    "background": ({"background": True}, "background = true"),
    "text": (
        {"text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        "text = .* own distribution",
    ),
    "verbosity": ({"text": {"verbosity": "low"}}, "text = .*it may have a format, and nothing else"),
    "tools": ({"tools": [{"type": "web_search"}]}, "only functions can be called"),
    "item": (
        {"input": [{"type": "computer_call"}]},
        r"input\[0\] = .*: there are message, function_call",
    ),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "the policy reads text only",
    ),
    "nothing": ({"input": []}, "input must be text, or a list"),
    "instructions": ({"instructions": [1]}, "instructions = .*must be text"),
}


@pytest.mark.parametrize("case", REFUSED_RESPONSES)
def test_responses_that_are_refused(case: str):
    changed, message = REFUSED_RESPONSES[case]
    with pytest.raises(UnanswerableRequest, match=message):
        responses.parse({"input": "a", **changed}, RULES)


def test_fields_that_are_neutral_or_ignored():
    body = {
        "messages": HELLO,
        "temperature": 0.7,
        "top_p": 1.0,
        "n": 1,
        "logit_bias": {},
        "seed": 3,
        "user": "me",
    }
    assert chat_completions.parse(body, Rules(0.7)) == Asked(HELLO)
    wild = body | {"temperature": 0, "stop": ["x"], "model": "gpt-4o", "verbosity": "low"}
    ignoring = Rules(0.7, ignore={"temperature", "stop", "model", "verbosity"})
    assert chat_completions.parse(wild, ignoring) == Asked(HELLO)
    with pytest.raises(UnanswerableRequest, match=r"set orchestrator\.tool_parser to the parser"):
        chat_completions.parse({"messages": HELLO, "tools": TOOLS}, Rules(1.0, calls_are_read=False))
    developer = [{"role": "developer", "content": "a"}]
    assert chat_completions.parse({"messages": developer}, RULES).messages[0]["role"] == "system"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_as_openais_client_knows_them(stream: bool):
    async def test() -> None:
        model = Scripted()
        async with served(model) as (client, _, _):

            async def ask(messages: Any, **settings: Any) -> None:
                await client.chat.completions.create(
                    model="policy", messages=messages, stream=stream, **settings
                )

            with pytest.raises(openai.BadRequestError, match="add 'temperature' to ignore") as refused:
                await ask(HELLO, temperature=0.2)
            assert (refused.value.param, refused.value.code) == ("temperature", "unsupported_value")
            with pytest.raises(openai.BadRequestError) as refused:
                await ask([{"role": "user", "content": "full"}])
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="the chat template fails"):
                await ask([{"role": "user", "content": "template"}])
            with pytest.raises(openai.NotFoundError, match="there are POST /v1/chat/completions"):
                await client.embeddings.create(model="policy", input="a")
            with pytest.raises(openai.NotFoundError, match="only 'policy'"):
                await client.models.retrieve("gpt-4o")
            assert [one.id async for one in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
        assert len(model.asked) == 2

    run(test())


def test_nobody_else_gets_in():
    """A wrong key, no key, the key of a rollout that has ended, and other addresses of the machine."""

    async def test() -> None:
        model = Scripted()
        async with served(model) as (client, _, endpoint):
            for key in ("wrong", client.api_key + "x", "é".encode().decode("latin-1")):
                headers = {"Authorization": f"Bearer {key}"}
                async with aiohttp.ClientSession(headers=headers) as other:
                    for path in ("/models", "/models/policy"):
                        async with other.get(endpoint.url + path) as answer:
                            assert answer.status == 401
                    for path in ("/chat/completions", "/responses", "/elsewhere"):
                        async with other.post(endpoint.url + path, json={"messages": HELLO}) as answer:
                            assert answer.status == 401
                            assert (await answer.json())["error"]["code"] == "invalid_api_key"
            async with aiohttp.ClientSession() as other, other.get(f"{endpoint.url}/models") as answer:
                assert answer.status == 401
            port = httpx.URL(endpoint.url).port
            assert endpoint.url == f"http://127.0.0.1:{port}/v1"
            for address in {"127.0.0.2", socket.gethostbyname(socket.gethostname())} - {"127.0.0.1"}:
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(address, port)
            async with endpoint.session(Scripted(), RULES) as (key, _):
                late = client.with_options(api_key=key)
                await late.models.list()
            with pytest.raises(openai.AuthenticationError):
                await late.models.list()
        assert not model.asked

    run(test())


# One turn, however often it is asked for


def test_a_request_that_the_client_sends_again_is_one_turn():
    """After a timeout: the second try waits for the answer that the first one has begun."""

    async def test() -> None:
        model = Scripted()
        model.open.clear()
        tries: list[str] = []

        async def sent(request: httpx.Request) -> None:
            tries.append(request.headers["x-stainless-retry-count"])
            if len(tries) > 2:
                model.open.set()

        async with served(model) as (client, session, _):
            http = httpx.AsyncClient(event_hooks={"request": [sent]})
            again = client.with_options(http_client=http, timeout=0.2, max_retries=100)
            assert (await chat(again, HELLO))["content"] == "7 0"
            assert session.requests == 1
        assert (tries[0], tries[1]) == ("0", "1")
        assert len(tries) > 2
        assert len(model.asked) == 1

    run(test())


def test_clients_that_do_not_say_that_they_try_again():
    """It is another try if the first connection was closed before the answer; if not, it is a new turn."""

    async def test() -> None:
        model = Scripted()
        body = json.dumps({"messages": HELLO})
        async with served(model) as (client, session, endpoint):
            headers = {"Authorization": f"Bearer {client.api_key}"}

            async def post(**further: str) -> str:
                async with (
                    aiohttp.ClientSession(headers=headers | further) as http,
                    http.post(f"{endpoint.url}/chat/completions", data=body) as answer,
                ):
                    return (await answer.json())["choices"][0]["message"]["content"]

            model.open.clear()
            first = asyncio.create_task(post())
            await until(lambda: len(model.asked) == 1)
            (exchange,) = session._exchanges.values()
            first.cancel()
            await until(lambda: exchange.abandoned)
            model.open.set()
            assert await post() == "7 0"  # the first one's
            assert await post() == "7 1"  # that one had arrived, so this is a new one
            assert await post(**{"x-stainless-retry-count": "1"}) == "7 1"
            assert await post(**{"x-stainless-retry-count": "0"}) == "7 2"
            model.open.clear()
            both = [asyncio.create_task(post()) for _ in range(2)]
            await until(lambda: len(model.asked) == 5)  # two at once, both there
            model.open.set()
            assert sorted(await asyncio.gather(*both)) == ["7 3", "7 4"]

    run(test())


def test_equal_requests_at_the_same_time_all_end_with_the_session():
    """An answer that came afterwards would be a turn of the rollout's that nobody has read."""

    async def test() -> None:
        model = Scripted()
        model.open.clear()
        session = Session(model, RULES)
        both = [
            session.ask(Asked(HELLO), b"the same", retry=False, is_open=lambda: True).answer for _ in range(2)
        ]
        await until(lambda: len(model.asked) == 2)
        session.close()
        model.open.set()
        await asyncio.wait(both)
        assert [answer.cancelled() for answer in both] == [True, True]

    run(test())


def test_what_is_kept_of_a_session_is_bounded():
    async def test() -> None:
        async with served(Scripted()) as (client, session, _):
            for number in range(40):
                await chat(client, [{"role": "user", "content": str(number)}])
            assert len(session._exchanges) <= 17
            assert session.requests == 40

    run(test())


def test_an_endpoint_that_could_not_be_started_is_started_by_the_next_rollout(
    monkeypatch: pytest.MonkeyPatch,
):
    """All that wait for it hear why; nothing of the failed try is left."""

    async def test() -> None:
        endpoint = Endpoint()
        loop = asyncio.get_running_loop()

        async def full(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(0)
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(loop, "create_server", full)
            found = await asyncio.gather(endpoint.start(), endpoint.start(), return_exceptions=True)
        assert [str(one) for one in found] == ["[Errno 24] Too many open files"] * 2
        await endpoint.start()
        first = endpoint.url
        await endpoint.start()
        assert endpoint.url == first
        async with (
            endpoint.session(Scripted(), RULES) as (key, _),
            openai.AsyncOpenAI(base_url=endpoint.url, api_key=key) as client,
        ):
            assert [model.id async for model in client.models.list()] == ["policy"]
        await endpoint.close()

    run(test())


@draws.seldom
def test_200_sessions_at_once():
    """Each hears what is its own, in its own order."""

    async def test() -> None:
        endpoint = Endpoint()
        await asyncio.gather(*(endpoint.start() for _ in range(3)))
        ways = list(WAYS.values())

        async def agent(client: openai.AsyncOpenAI, seed: int) -> None:
            async with endpoint.session(Scripted(seed), RULES) as (key, session):
                own = client.with_options(api_key=key)
                for turn in range(2):
                    message = await ways[(seed + turn) % 4](own, [{"role": "user", "content": str(turn)}])
                    assert message["content"] == f"{seed} {turn}"
                assert session.requests == 2

        async with openai.AsyncOpenAI(
            base_url=endpoint.url, api_key="none", timeout=DEADLINE, max_retries=0
        ) as client:
            await asyncio.gather(*(agent(client, seed) for seed in range(200)))
        await endpoint.close()

    run(test())


# With rollouts


class Agent:
    """A conversation of four turns, through the endpoint or (with no way) with the model itself."""

    def __init__(self, way: Callable[..., Awaitable[dict[str, Any]]] | None):
        self.way = way
        self.endpoint = Endpoint()

    def __len__(self) -> int:
        return 3

    async def rollout(self, problem: int, model: Any) -> float:
        if self.way is None:
            return await self.talk(lambda messages: model.generate(messages), problem)
        await self.endpoint.start()
        async with (
            self.endpoint.session(model, RULES) as (key, _),
            openai.AsyncOpenAI(base_url=self.endpoint.url, api_key=key, max_retries=0) as client,
        ):
            return await self.talk(lambda messages: self.way(client, messages), problem)

    async def talk(self, ask: Callable[[list[Any]], Awaitable[Any]], problem: int) -> float:
        messages: list[Any] = [{"role": "user", "content": f"{problem}"}]
        for turn in range(4):
            reply = await ask(messages)
            message = reply.message if isinstance(reply, Reply) else reply
            messages += [message, {"role": "user", "content": f"{turn}"}]
        return float(len(messages[-2]["content"]))


@pytest.mark.slow
@pytest.mark.parametrize("way", draws.cases(list(ALL_WAYS), "ways", 3))
def test_a_rollout_through_the_endpoint_is_the_one_with_the_model_itself(way: str, tmp_path: Path):
    """Token for token, as one branch; also where whoever records a turn is killed, again and again."""
    direct = complete(runner(tmp_path / "direct", Agent(None), Servers()))
    servers, deaths = Servers(), 0
    while True:
        one = runner(tmp_path / way, Agent(ALL_WAYS[way]), servers)
        one.ledger.left = 0
        try:
            found = complete(one)
            break
        except Power:
            deaths += 1
    assert digest(found) == digest(direct)
    assert found == direct
    assert deaths >= 8
    assert {len({turn.branch for turn in rollout.turns}) for rollout in found.rollouts} == {1}
    assert set(Counter(seed for seed, _ in servers.asked).values()) == {1}
    assert [rollout.diverged for rollout in found.rollouts] == [0, 0]
