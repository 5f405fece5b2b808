"""vLLM plugin: what stands in front of the server's routes, in the order in which a request meets it.

The token check with the limit on the size of a request, the refusals of a sleeping server, the count of open
requests, and on CPUs the refusal of requests that name no adapter. Runs inside vLLM's API process only.
"""

import asyncio
import hmac
import json
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from cairn.inference.client import ASLEEP

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

OPEN_ROUTES = {
    "GET": {"/health", "/cairn/status", "/v1/models", "/version", "/metrics"},
    "POST": {"/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"},
}
"""Routes that need no token: generation and status."""
MAX_BODY = 32 << 20
"""Bytes of a request's body; a prompt of a million tokens takes a quarter of it."""
TEXT_ROUTES = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
"""Open routes whose text is tokenised by one thread, for which all other text requests wait."""
MAX_TEXT = 8 << 20
"""Bytes of a request's body there: more than a million tokens, and a few seconds of that thread."""


class Guard:
    """ASGI middleware: asks for the token on all but the open routes, then bounds the body, then passes on.

    Nothing of a request is read, let alone parsed, before its token was seen.
    """

    def __init__(
        self, app: ASGIApp, token: str, how_to_get_it: str, max_body: int = MAX_BODY, max_text: int = MAX_TEXT
    ):
        self._app = app
        self._bearer = b"Bearer " + token.encode()
        self._how_to_get_it = how_to_get_it
        self._max_body = max_body
        self._max_text = max_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        is_open = scope["type"] == "http" and scope["path"] in OPEN_ROUTES.get(scope["method"], ())
        if not is_open and not hmac.compare_digest(headers.get(b"authorization", b""), self._bearer):
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            refusal = failure(
                401,
                "this route needs the server's token as 'Authorization: Bearer TOKEN'; "
                + self._how_to_get_it,
                {"WWW-Authenticate": "Bearer"},
            )
            return await refusal(scope, receive, send)
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_text = is_open and scope["path"] in TEXT_ROUTES
        most = min(self._max_text, self._max_body) if is_text else self._max_body
        body = await self._body(headers, receive, most)
        if body is None:
            # A client may read no answer before it has sent its whole body; closing the connection stops it.
            refusal = failure(413, f"the body has more than {most} bytes", {"Connection": "close"})
            return await refusal(scope, receive, send)
        unread: list[Message] = [body]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        return await self._app(scope, replay, send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, most: int) -> Message | None:
        """The whole body as one message, or that the client has gone; None if it is too large."""
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            return None
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                return None
            if not message.get("more_body", False):
                return {"type": "http.request", "body": b"".join(parts), "more_body": False}


def failure(code: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer in the shape of vLLM's own errors; of raised ones vLLM would hide the paths."""
    return JSONResponse({"error": {"message": message, "code": code}}, code, headers)


# The sleep of a server, which frees its GPU memory and keeps its weights and their version.


logger = init_logger("vllm.cairn")

WITHOUT_THE_MODEL = {"/cairn/sleep", "/cairn/wake", "/pause", "/tokenize", "/detokenize"}
"""Routes other than GET that a sleeping server answers: they touch no memory of the GPU."""


class Sleep:
    """Whether the server sleeps, and how it falls asleep and wakes.

    vLLM's sleep of level 1 copies the weights into host memory and drops the KV cache; virtual addresses
    stay reserved, so CUDA graphs are valid after waking. Requests in flight stay queued, as in a pause that
    clears the cache, and are recomputed after waking. On a CPU only the scheduler pauses.
    """

    def __init__(self) -> None:
        self.asleep = False
        """Whether generation is refused: from the moment that the server begins to fall asleep."""
        self._complete = False
        self._was_paused = False

    async def begin(self, engine: "AsyncLLM") -> None:
        """Fall asleep; does nothing if the server sleeps. A call that failed may be repeated.

        Raises:
            Exception: of vLLM; generation stays refused.
        """
        if self._complete:
            return
        if not self.asleep:
            self._was_paused = await engine.is_paused()
        self.asleep = True
        await engine.sleep(level=1, mode="keep")
        self._complete = True
        logger.info("asleep")

    async def end(self, engine: "AsyncLLM") -> None:
        """Wake up with the weights that the server had; does nothing if it is awake. May be repeated.

        Raises:
            Exception: of vLLM; generation stays refused.
        """
        if not self.asleep:
            return
        await self.begin(engine)  # memory that is half gone can't be woken
        self._complete = False
        await engine.wake_up()  # which also ends a pause
        if self._was_paused:  # since an update failed half-way
            await engine.engine_core.pause_scheduler_async("keep", True)
        self.asleep = False
        logger.info("awake")


class AsleepGuard:
    """ASGI middleware: while the server sleeps, answers 503 wherever the model would be needed."""

    def __init__(self, app: ASGIApp, sleep: Sleep):
        self._app = app
        self._sleep = sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_model = (
            scope["type"] == "http" and scope["method"] != "GET" and scope["path"] not in WITHOUT_THE_MODEL
        )
        if self._sleep.asleep and needs_model:
            return await failure(503, f"{ASLEEP}; POST /cairn/wake wakes it")(scope, receive, send)
        return await self._app(scope, receive, send)


# Which requests are open, so that what they may still use is kept until they have ended.


class OpenRequests:
    """The requests that the server is answering."""

    def __init__(self) -> None:
        self._open: set[asyncio.Event] = set()

    def begin(self) -> asyncio.Event:
        """A request has come; hand what this returns to `end`."""
        request = asyncio.Event()
        self._open.add(request)
        return request

    def end(self, request: asyncio.Event) -> None:
        """It is answered, or given up."""
        self._open.discard(request)
        request.set()

    async def ended(self) -> None:
        """Wait until all requests have ended that are open now."""
        await asyncio.gather(*(request.wait() for request in [*self._open]))


class CountingRequests:
    """ASGI middleware: notes each request that may generate."""

    def __init__(self, app: ASGIApp, requests: OpenRequests):
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["method"] == "POST"
        if not counts or scope["path"].startswith("/cairn/"):
            return await self._app(scope, receive, send)
        request = self._requests.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests.end(request)


# On CPUs, requests that name no adapter while the server has adapters.


GENERATING = ("/v1/", "/inference/")
"""How the paths begin of routes that need the model."""


class NamedOnly:
    """ASGI middleware, behind the guard, which hands a body on as one message.

    Args:
        names: the adapters of which a request has to name one; None: it needs to name none.
    """

    def __init__(self, app: ASGIApp, names: Callable[[], Collection[str] | None]):
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = (
            scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(GENERATING)
        )
        if not generates or (names := self._names()) is None:
            return await self._app(scope, receive, send)
        body = await receive()
        try:
            asked = json.loads(body.get("body", b"") or b"{}")
            model = asked.get("model") if isinstance(asked, dict) else None
        except ValueError:
            model = None
        if body["type"] == "http.request" and model not in names:
            status = 400 if model is None else 404
            reason = f"the request's model is {model!r}, and has to be an adapter of this server"
            return await failure(status, f"{reason}: {', '.join(names)}")(scope, receive, send)
        unread: list[Message] = [body]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        return await self._app(scope, replay, send)
