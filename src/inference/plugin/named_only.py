"""vLLM plugin: on CPUs, refuses requests that name no adapter while the server has adapters.

vLLM's kernels for CPUs take the absence of an adapter, -1, for the last adapter in memory
(`lora/ops/torch_ops/lora_ops.py`: `lora_b_weights[lora_indices_tensor]`), if others of the batch have one.

Runs inside vLLM's API process only.
"""

import json
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.inference.plugin.guard import failure

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
