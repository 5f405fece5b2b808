"""vLLM plugin: policies that are adapters, which vLLM computes beside the model's weights, unmerged.

Each policy is loaded by vLLM's own means, under a name and a path of its own, and never in place of another.
So requests in flight end under the adapter that they began with, generation goes on meanwhile, and the prefix
cache, which vLLM keys by an adapter's name and path, never mixes two policies.

Runs inside vLLM's API process only.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.logger import init_logger

from cairn.inference.plugin.adapter_copies import MERGED, AdapterCopies, AdapterCopy
from cairn.inference.plugin.auth import failure
from cairn.inference.plugin.updates import NotTaken, PolicyUpdate, Updates, WeightUpdate
from cairn.policy.errors import Unchanged

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# vLLM plugin: which requests are open, so that what they may still use is kept until they have ended.


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


logger = init_logger("vllm.cairn")

KEPT = 2
"""Policies that new requests may name: the newest, and the one before, since a request may be on its way."""


@dataclass(frozen=True)
class Loaded:
    """A policy that requests may name. number: vLLM's own of it."""

    version: str
    name: str
    number: int
    copy: AdapterCopy


class Unmerged(Updates):
    """Has vLLM load each policy as an adapter, and drops those that no request uses any more."""

    def __init__(
        self, engine: "AsyncLLM", models: OpenAIServingModels, requests: OpenRequests, copies: AdapterCopies
    ):
        self._engine = engine
        self._models = models
        self._requests = requests
        self._copies = copies
        self._loaded: list[Loaded] = []
        self._dropping: set[asyncio.Task[None]] = set()

    async def version(self) -> str:
        own = await self._engine.get_weight_version()  # which shows that the engine is alive
        return self._loaded[-1].version if self._loaded else own

    @property
    def adapter(self) -> str | None:
        return self._loaded[-1].name if self._loaded else None

    @property
    def must_name(self) -> Collection[str] | None:
        on_cpu = self._engine.vllm_config.device_config.device_type == "cpu"
        return [loaded.name for loaded in self._loaded] if on_cpu and self._loaded else None

    async def take(self, update: WeightUpdate, noted: PolicyUpdate) -> str:
        """See `Updates`. Requests in flight go on under the adapter that they began with."""
        try:
            copy = await asyncio.to_thread(self._copies.add, update.path)
        except Unchanged as error:
            raise NotTaken.because(error) from None
        except Exception as error:
            logger.exception("cannot prepare %s", update.path)
            raise NotTaken(422, f"{update.path}: {error!r}") from None
        try:
            number, name = await self._load(f"{update.version}@{secrets.token_hex(4)}", update.path, copy)
        except BaseException:
            self._copies.remove(copy)
            raise
        self._loaded.append(Loaded(update.version, name, number, copy))
        while len(self._loaded) > KEPT:
            await self._forget(self._loaded.pop(0))
        return update.version

    async def _load(self, name: str, path: str, copy: AdapterCopy) -> tuple[int, str]:
        """Have vLLM load a copy; returns its number and the name.

        Raises:
            NotTaken: it refuses, or does not compute with all of it.
        """
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=str(copy.folder))
        answer = await self._models.load_lora_adapter(request)
        if isinstance(answer, ErrorResponse):
            reason = answer.error.message
            if self._engine.errored:
                raise NotTaken(500, f"the engine failed while it loaded the adapter: {reason}")
            raise NotTaken(422, f"{path}: vLLM can't compute with this adapter: {reason}; {MERGED}")
        number = self._models.lora_requests[name].lora_int_id
        by_worker = await self._engine.collective_rpc("cairn_adapter_parts", args=(number,))
        parts = {part for parts in by_worker for part in parts}
        if len(parts) != len(copy.modules):
            await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
            await self._engine.remove_lora(number)
            raise NotTaken(
                422,
                f"{path}: vLLM computes with {len(parts)} of the {len(copy.modules)} pairs of matrices of "
                f"this adapter, of layers such as {max(copy.modules)}, and leaves out the others; {MERGED}",
            )
        return number, name

    async def _forget(self, old: Loaded) -> None:
        """Let no new request name a policy, and drop it when those have ended that may have named it."""
        await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=old.name))
        dropping = asyncio.create_task(self._drop(old))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, old: Loaded) -> None:
        await self._requests.ended()
        try:
            await self._engine.remove_lora(old.number)
        finally:
            self._copies.remove(old.copy)
        logger.info("dropped adapter %s", old.name)


# vLLM plugin: on CPUs, refuses requests that name no adapter while the server has adapters.


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
