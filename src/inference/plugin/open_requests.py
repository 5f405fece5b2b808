"""vLLM plugin: which requests are open, so that what they may still use is kept until they have ended.

Runs inside vLLM's API process only.
"""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send


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
