"""In front of every route of the server: the token check, and the limit on the size of a request."""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_ROUTES = {
    "GET": {"/health", "/cairn/status", "/v1/models", "/version", "/metrics"},
    "POST": {
        "/inference/v1/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    },
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
        self,
        app: ASGIApp,
        token: str,
        how_to_get_it: str,
        max_body: int = MAX_BODY,
        max_text: int = MAX_TEXT,
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
