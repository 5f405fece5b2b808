"""The HTTP server of the endpoint: on 127.0.0.1 only, with a key for each rollout."""

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cairn.endpoint import chat_completions, messages, responses
from cairn.endpoint.asked import MODEL_NAME, Asked, Rules, UnanswerableRequest, read_body
from cairn.endpoint.session import ChatModel, Exchange, Reply, Session

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
LARGEST_REQUEST = 64 << 20
"""Bytes."""
SIGN_SECONDS = 10.0
"""How often a client of a streamed answer is shown that the server lives, until the answer is there."""
RETRY = "x-stainless-retry-count"
"""The header in which clients of both APIs say how often they have sent a request before."""
LONG = 1 << 20
"""Bytes of a body from which on it is read on a thread."""


@dataclass(frozen=True)
class _Kind:
    """How requests of one path are read, and their answers and errors written; `events` has lines of a
    stream."""

    parse: Callable[[Any, Rules], Asked]
    whole: Callable[[Reply, str, Asked], dict[str, Any]]
    events: Callable[[Reply, str, Asked], Iterator[str]]
    error: Callable[[UnanswerableRequest], dict[str, Any]] = lambda refused: refused.body


def _lines_of_chunks(reply: Reply, name: str, asked: Asked) -> Iterator[str]:
    for chunk in chat_completions.chunks(reply, name, include_usage=asked.include_usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _lines(events: Callable[[Reply, str, Asked], Iterator[dict[str, Any]]]) -> Any:
    """What writes the lines of events that have names."""

    def lines(reply: Reply, name: str, asked: Asked) -> Iterator[str]:
        for event in events(reply, name, asked):
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    return lines


KINDS = {
    "/v1/chat/completions": _Kind(
        chat_completions.parse,
        lambda reply, name, _: chat_completions.completion(reply, name),
        _lines_of_chunks,
    ),
    "/v1/responses": _Kind(responses.parse, responses.response, _lines(responses.events)),
    "/v1/messages": _Kind(messages.parse, messages.answer, _lines(messages.events), messages.error),
}
COUNT = "/v1/messages/count_tokens"


class Endpoint:
    """Answers the requests of agents with their rollouts' `Model`.

    All of its methods but `close_soon` are for the event loop on which it was started.
    """

    def __init__(self):
        self._sessions: dict[str, tuple[Session, str]] = {}
        """Each with what the ids of its answers are made of, by its key."""
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._starting: asyncio.Task[int] | None = None
        self.url = ""
        """The base of all paths, once it is started."""

    async def start(self) -> None:
        """Listen on a free port, unless it does already; what has failed is tried again.

        Raises:
            OSError: it can't, for instance because this process has too many files open.
        """
        starting = self._starting
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception())):
            starting = self._starting = asyncio.create_task(self._start())
        port = await asyncio.shield(starting)
        self.url = f"http://{ADDRESS}:{port}/v1"

    async def _start(self) -> int:
        app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[self._checked])
        for path, kind in KINDS.items():
            app.router.add_post(path, functools.partial(self._answer, kind))
        app.router.add_post(COUNT, self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        runner = self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(runner.server, ADDRESS, 0, backlog=1024)
        except OSError:
            await runner.cleanup()
            raise
        (listening,) = self._server.sockets
        return listening.getsockname()[1]

    async def close(self) -> None:
        """Listen no more, and end all connections."""
        if self._server is not None and self._runner is not None:
            self._server.close()
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def session(self, model: ChatModel, rules: Rules) -> AsyncGenerator[tuple[str, Session]]:
        """A key, and what may be asked with it while the context lasts."""
        key, session = f"cairn-{secrets.token_urlsafe(24)}", Session(model, rules)
        name = hashlib.blake2b(str(model.seed).encode(), digest_size=8).hexdigest()
        self._sessions[key] = session, name
        try:
            yield key, session
        finally:
            del self._sessions[key]
            session.close()

    def close_soon(self) -> None:
        """Take no more connections; for any thread, if the event loop is about to be stopped."""
        if self._server is not None and not (loop := self._server.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._server.close)

    def _session(self, request: web.Request) -> tuple[Session, str]:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        found = found or self._sessions.get(request.headers.get("x-api-key", "").strip())
        if found is None:
            raise UnanswerableRequest(
                "no rollout that is being worked on has this key: send the one in OPENAI_API_KEY as a bearer "
                "token, or the one in ANTHROPIC_API_KEY as x-api-key",
                401,
                code="invalid_api_key",
            )
        return found

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Have a request answered; what is wrong with it is an error as the API's clients know it."""
        try:
            self._session(request)
            return await handler(request)
        except UnanswerableRequest as refused:
            return _error(request, refused)
        except web.HTTPRequestEntityTooLarge:
            return _error(
                request, UnanswerableRequest(f"a request may have at most {LARGEST_REQUEST} bytes", 413)
            )
        except web.HTTPException as error:
            paths = ", ".join(f"POST {path}" for path in (*KINDS, COUNT))
            what = f"{request.method} {request.path}: {error.reason}; there are {paths} and GET /v1/models"
            return _error(request, UnanswerableRequest(what, error.status))
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("a request of an agent could not be answered")
            return _error(
                request, UnanswerableRequest(f"the endpoint failed: {type(error).__name__}: {error}", 500)
            )

    async def _models(self, _: web.Request) -> web.Response:
        pages = {"has_more": False, "first_id": MODEL_NAME, "last_id": MODEL_NAME}
        return web.json_response({"object": "list", "data": [_DESCRIPTION], **pages})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != MODEL_NAME:
            raise UnanswerableRequest(
                f"there is no model {name!r}, only {MODEL_NAME!r}", 404, code="model_not_found"
            )
        return web.json_response(_DESCRIPTION)

    async def _answer(self, kind: _Kind, request: web.Request) -> web.StreamResponse:
        session, name = self._session(request)
        content = await request.read()
        asked = kind.parse(await _body(content), session.rules)
        retry = request.headers.get(RETRY, "0").strip() not in ("", "0")
        exchange = session.ask(
            asked, request.path.encode() + b" " + content, retry=retry, is_open=lambda: _is_open(request)
        )
        name = f"{name}-{exchange.number}"
        if asked.stream:
            return await self._stream(kind, request, asked, exchange, name)
        await asyncio.wait({exchange.answer})
        text = json.dumps(kind.whole(_reply(exchange), name, asked))
        response = web.Response(text=text, content_type="application/json")
        await _write(request, response, [], exchange)
        return response

    async def _count(self, request: web.Request) -> web.Response:
        """The number of tokens of a conversation, as its text makes them."""
        session, _ = self._session(request)
        asked = messages.parse(await _body(await request.read()), session.rules)
        return web.json_response({"input_tokens": await session.count(asked)})

    async def _stream(
        self, kind: _Kind, request: web.Request, asked: Asked, exchange: Exchange, name: str
    ) -> web.StreamResponse:
        """Answer with server-sent events; comments show that the server lives until the answer is whole."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await asyncio.wait({exchange.answer}, timeout=SIGN_SECONDS)
        while not exchange.answer.done():
            if not await _write(request, response, [": the answer is being sampled\n\n"]):
                return response
            await asyncio.wait({exchange.answer}, timeout=SIGN_SECONDS)
        try:
            lines = [*kind.events(_reply(exchange), name, asked)]
        except UnanswerableRequest as refused:
            if not response.prepared:
                raise
            lines = [f"event: error\ndata: {json.dumps(kind.error(refused))}\n\n"]
        await _write(request, response, lines, exchange)
        return response


_DESCRIPTION: Mapping[str, Any] = {
    **{"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "cairn"},
    **{"type": "model", "display_name": MODEL_NAME, "created_at": "1970-01-01T00:00:00Z"},
}
"""The model, as the clients of both APIs know models."""


async def _body(content: bytes) -> Any:
    """The decoded body of a request."""
    return await asyncio.to_thread(read_body, content) if len(content) > LONG else read_body(content)


def _reply(exchange: Exchange) -> Reply:
    """The answer.

    Raises:
        UnanswerableRequest: there is none, and why.
    """
    answer = exchange.answer
    if answer.cancelled():
        raise UnanswerableRequest("the rollout has ended", 503)
    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, UnanswerableRequest):
        raise error
    raise UnanswerableRequest(f"the rollout can't go on: {error}", 503) from error


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _write(
    request: web.Request, response: web.StreamResponse, lines: list[str], exchange: Exchange | None = None
) -> bool:
    """Write to the client, and with `exchange` end the answer to it. Returns whether the client is there."""
    try:
        if not response.prepared:
            await response.prepare(request)
        if lines:
            await response.write("".join(lines).encode())
        if exchange is not None:
            await response.write_eof()
    except ConnectionError:
        return False
    if exchange is not None and _is_open(request):
        exchange.deliver()
    return _is_open(request)


def _error(request: web.Request, refused: UnanswerableRequest) -> web.Response:
    of_messages = "anthropic-version" in request.headers or request.path in ("/v1/messages", COUNT)
    body = messages.error(refused) if of_messages else refused.body
    # Clients of both APIs try again after errors of servers unless the header says not to.
    return web.json_response(body, status=refused.status, headers={"x-should-retry": "false"})
