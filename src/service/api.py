"""The HTTP side of the Tinker API: who asks, what is asked, and the answers, as clients know them."""

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import zstandard
from aiohttp import web

from cairn.config.service import ServiceConfig, TenantConfig
from cairn.policy.errors import ServerUnavailable
from cairn.run.faults import fault_point
from cairn.run.seeds import derive
from cairn.service.ledger import ServiceLedger
from cairn.service.records import Handler, RecordRoutes, body_of
from cairn.service.sampler import SampleAsked, SampleServer
from cairn.service.schema import (
    CREATE,
    DONE,
    FAILED,
    FORWARD,
    LOAD,
    PASS,
    SAMPLE,
    SAVE,
    SAVE_SAMPLER,
    STEP,
    UNLOAD,
    WAITING,
    ModelRecord,
    ServiceCall,
)
from cairn.service.sessions import SessionWatch
from cairn.service.wire import PROTO, CallRefused, passed_json, read_pass, sampled_json, taken
from cairn.service.worker import JSON_BODY, PROTO_BODY, CallWorker, failure

logger = logging.getLogger(__name__)

ROOT = "/api/v1"
LARGEST_BODY = 256 << 20
"""Bytes of a request's body, once it is unpacked."""
POLL_SECONDS = 20.0
"""For so long a client that asks for an answer is kept waiting; then it asks again."""
UNEMBED = "adapters here are of attention and MLP layers; the output layer (train_unembed) stays as it is"


class ServiceApi:
    """Answers requests. All methods are for the event loop on which `serve` runs, but `finished`."""

    def __init__(
        self,
        config: ServiceConfig,
        names: list[str],
        folder: Path,
        keys: Mapping[str, TenantConfig],
        ledger: ServiceLedger,
        end_tokens: tuple[int, ...],
    ):
        """Take what requests are answered from.

        Args:
            names: of the base, as clients may call it.
            folder: of the base, where its tokenizer is.
            keys: the tenants, by the SHA-256 of their keys.
            end_tokens: at which samples end unless the client says otherwise.
        """
        self._config, self._names, self._folder = config, names, folder
        self._keys, self._ledger, self._end_tokens = keys, ledger, end_tokens
        self._records = RecordRoutes(names[0], folder, ledger)
        self.sessions = SessionWatch(config.session_timeout, ledger, self._set_aside)
        self._worker: CallWorker | None = None
        self._sampler: SampleServer | None = None
        self._events: dict[str, asyncio.Event] = {}
        self._sampling: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, worker: CallWorker, sampler: SampleServer | None) -> None:
        """Take up the calls that wait in the ledger; `sampler`: None if nobody samples."""
        self._loop = asyncio.get_running_loop()
        self._worker, self._sampler = worker, sampler
        worker.start()
        for call in self._ledger.calls("state = ? AND kind = ?", WAITING, SAMPLE):
            self._begin_sample(call)
        self.sessions.begin()

    async def end(self) -> None:
        """Give up samples that are under way: they are taken up at the next start."""
        await self.sessions.end()
        for task in list(self._sampling):
            task.cancel()
        await asyncio.gather(*self._sampling, return_exceptions=True)

    def finished(self, id: str) -> None:
        """A call is finished; any thread may say so."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, id)

    def _wake(self, id: str) -> None:
        if event := self._events.pop(id, None):
            event.set()

    def _set_aside(self, model: str) -> None:
        assert self._worker is not None, "it has begun"
        self._worker.set_aside(model)

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=LARGEST_BODY)
        posts: dict[str, Handler] = {
            **{f"/{kind}": functools.partial(self._save, kind=kind) for kind in (SAVE, SAVE_SAMPLER)},
            f"/{PASS}": functools.partial(self._pass, forward_only=False),
            f"/{FORWARD}": functools.partial(self._pass, forward_only=True),
            f"/{CREATE}": self._create,
            f"/{LOAD}": self._load,
            f"/{STEP}": self._step,
            f"/{UNLOAD}": self._unload,
            "/asample": self._sample,
            "/retrieve_future": self._retrieve,
            "/cancel_future": self._ok,
            "/telemetry": self._telemetry,
            "/client/config": self._client_config,
            "/client/dynamic_config": self._dynamic_config,
            "/create_session": self._create_session,
            "/session_heartbeat": self._heartbeat,
            "/sessions/{session}/finish": self._finish,
            "/create_sampling_session": self._create_sampler,
            "/join_sampling_session": self._join_sampler,
        }
        gets: dict[str, Handler] = {"/get_server_capabilities": self._capabilities, **self._records.gets()}
        posts |= self._records.posts()
        app.router.add_get(f"{ROOT}/healthz", self._health)
        for path, handler in posts.items():
            app.router.add_post(ROOT + path, self._known(handler))
        for path, handler in gets.items():
            app.router.add_get(ROOT + path, self._known(handler))
        delete = "/training_runs/{model}/checkpoints/{checkpoint:.+}"
        app.router.add_delete(ROOT + delete, self._known(self._delete))
        app.router.add_route("*", ROOT + "/{rest:.*}", self._known(self._not_there))
        return app

    def _known(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The handler, for requests with a tenant's key; what is refused is an error as clients read it."""

        async def handle(request: web.Request) -> web.Response:
            given = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix(
                "Bearer "
            )
            digest = hashlib.sha256(given.encode()).hexdigest()
            tenant = next((one for key, one in self._keys.items() if hmac.compare_digest(key, digest)), None)
            try:
                if tenant is None:
                    raise CallRefused(
                        "X-API-Key: no tenant of this service has this key (TINKER_API_KEY)", 401
                    )
                return await handler(request, tenant)
            except CallRefused as refused:
                return web.json_response(
                    {"detail": str(refused), "error": str(refused)}, status=refused.status
                )
            except (web.HTTPException, ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                logger.exception("%s could not be answered", request.path)
                reason = f"the service failed: {type(error).__name__}: {error}"
                return web.json_response({"detail": reason, "error": reason}, status=500)

        return handle

    # What is answered at once

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _not_there(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        raise CallRefused(
            f"{request.method} {request.path}: this service does not have this part of the API", 404
        )

    async def _ok(self, _: web.Request, tenant: TenantConfig) -> web.Response:
        """A sample that a client has given up goes on: its answer is kept like others."""
        return web.json_response({})

    async def _telemetry(self, _: web.Request, tenant: TenantConfig) -> web.Response:
        """What clients tell of themselves is not kept."""
        return web.json_response({"status": "accepted"})

    async def _client_config(self, _: web.Request, tenant: TenantConfig) -> web.Response:
        """Chunks of a large batch come one after the other, since calls are taken in their order."""
        return web.json_response({"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False})

    async def _dynamic_config(self, _: web.Request, tenant: TenantConfig) -> web.Response:
        return web.json_response({})

    async def _capabilities(self, _: web.Request, tenant: TenantConfig) -> web.Response:
        about = {
            "max_context_length": self._config.seq_len,
            "trainable": True,
            "sampleable": self._sampler is not None,
        }
        return web.json_response(
            {"supported_models": [{"model_name": name, **about} for name in self._names]}
        )

    async def _create_session(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        session, about = f"s{secrets.token_hex(12)}", await body_of(request)
        await asyncio.to_thread(self._ledger.add_session, session, tenant.name, about)
        await self.sessions.sign(session)
        return web.json_response({"type": "create_session", "session_id": session, "info_message": UNEMBED})

    async def _heartbeat(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        session = taken(await body_of(request), "session_id", str)
        self._ledger.session(session, tenant.name)
        await self.sessions.sign(session)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        session = request.match_info["session"]
        models = await asyncio.to_thread(self._ledger.finish_session, session, tenant.name)
        self.sessions.finished(session)
        for model in models:
            await self._add(tenant, self._call(tenant, UNLOAD, model, self._ledger.next_seq(model), b"{}"))
        return web.json_response({})

    async def _create_sampler(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        body = await body_of(request)
        session, number = taken(body, "session_id", str), taken(body, "sampling_session_seq_id", int)
        self._ledger.session(session, tenant.name)
        path = body.get("model_path")
        if path is not None:
            self._ledger.checkpoint(path, tenant.name)
        else:
            self._check_name(body.get("base_model"))
        await self.sessions.sign(session)
        sampler = f"{session}:sample:{number}"
        await asyncio.to_thread(self._ledger.add_sampler, sampler, tenant.name, session, path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _join_sampler(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        sampler = taken(await body_of(request), "sampling_session_id", str)
        number = await asyncio.to_thread(self._ledger.join_sampler, sampler, tenant.name)
        return web.json_response({"type": "join_sampling_session", "client_counter": number})

    def _check_name(self, name: object) -> None:
        if name not in self._names:
            raise CallRefused(f"base_model {name!r}: this service has {', '.join(self._names)}", 400)

    async def _delete(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        path = f"tinker://{request.match_info['model']}/{request.match_info['checkpoint']}"
        assert self._worker is not None, "it has begun"
        await asyncio.to_thread(self._worker.remove, self._ledger.checkpoint(path, tenant.name))
        return web.json_response({})

    # Calls of models

    async def _create(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        body = await body_of(request)
        self._check_name(body.get("base_model"))
        optimizer = (body.get("optimizer_config") or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise CallRefused(f"optimizer_config: {optimizer!r} is given, and this service has adamw")
        lora = body.get("lora_config")
        if not isinstance(lora, dict):
            raise CallRefused("lora_config: this service trains adapters, so it has to be given")
        rank = taken(lora, "rank", int)
        if not 1 <= rank <= self._config.max_rank:
            raise CallRefused(
                f"lora_config: rank = {rank} is not from 1 to {self._config.max_rank} (max_rank)"
            )
        which = {name: bool(lora.get(name, True)) for name in ("train_mlp", "train_attn")}
        return await self._new_model(tenant, body, CREATE, {"rank": rank, "seed": lora.get("seed"), **which})

    async def _load(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        """Weights into a model that is there, or into a new one, whose adapter is as the checkpoint's."""
        body = await body_of(request)
        saved = self._ledger.checkpoint(taken(body, "path", str), tenant.name)
        if body.get("session_id") is None:
            return await self._of_model(tenant, LOAD, body)
        if body.get("base_model") is not None:
            self._check_name(body["base_model"])
        return await self._new_model(tenant, body, LOAD, self._ledger.model(saved.model).lora)

    async def _new_model(
        self, tenant: TenantConfig, body: dict[str, Any], kind: str, lora: dict[str, Any]
    ) -> web.Response:
        session, number = taken(body, "session_id", str), taken(body, "model_seq_id", int)
        self._ledger.session(session, tenant.name)
        id = f"{session}:train:{number}"
        seed = lora["seed"]
        lora = {**lora, "seed": derive(self._config.seed, "service_model", id) if seed is None else int(seed)}
        model = ModelRecord(
            id, tenant.name, session, lora, body.get("user_metadata") or {}, time.time(), False
        )
        call = self._call(tenant, kind, id, 0, json.dumps(body, sort_keys=True).encode())
        return await self._answered(tenant, call, model)

    async def _pass(self, request: web.Request, tenant: TenantConfig, forward_only: bool) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "zstd":
            body = await asyncio.to_thread(_unpacked, body)
        proto = request.content_type == PROTO
        asked = await asyncio.to_thread(read_pass, body, proto=proto, forward_only=forward_only)
        self._ledger.model(asked.model_id, tenant.name)
        seq = asked.seq_id if asked.seq_id is not None else self._ledger.next_seq(asked.model_id)
        kind = FORWARD if asked.forward_only else PASS
        content = (PROTO_BODY if proto else JSON_BODY) + body
        return await self._answered(
            tenant, self._call(tenant, kind, asked.model_id, seq, content, asked.digest())
        )

    async def _step(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        body = await body_of(request)
        given = next(
            (body[key] for key in ("adam_params", "optim_params", "optimizer_params") if key in body), {}
        )
        return await self._of_model(tenant, STEP, body, given)

    async def _save(self, request: web.Request, tenant: TenantConfig, kind: str) -> web.Response:
        body = await body_of(request)
        name = body.get("path")
        if name is not None and (not isinstance(name, str) or not name or "/" in name or len(name) > 200):
            raise CallRefused(
                f"path: {str(name)[:80]!r} is no name of a checkpoint: up to 200 characters without /"
            )
        if body.get("kind", "snapshot") != "snapshot":
            raise CallRefused(
                f"kind: {body['kind']!r} is given, and this service has 'snapshot', whose weights stay"
            )
        return await self._of_model(tenant, kind, body)

    async def _unload(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        return await self._of_model(tenant, UNLOAD, await body_of(request))

    async def _of_model(
        self, tenant: TenantConfig, kind: str, body: dict[str, Any], asked: dict[str, Any] | None = None
    ) -> web.Response:
        """A call of a model that is there; `asked`: what of the body says what to do (default: all of it)."""
        model = self._ledger.model(taken(body, "model_id", str), tenant.name)
        seq = body.get("seq_id")
        seq = self._ledger.next_seq(model.id) if seq is None else taken(body, "seq_id", int)
        content = json.dumps(body if asked is None else asked, sort_keys=True).encode()
        return await self._answered(tenant, self._call(tenant, kind, model.id, seq, content))

    def _call(
        self, tenant: TenantConfig, kind: str, owner: str, seq: int, body: bytes, digest: bytes = b""
    ) -> ServiceCall:
        digest = digest or hashlib.blake2b(kind.encode() + b" " + body, digest_size=16).digest()
        return ServiceCall(f"{owner}:{seq}", owner, seq, tenant.name, kind, digest, body)

    async def _answered(
        self, tenant: TenantConfig, call: ServiceCall, model: ModelRecord | None = None
    ) -> web.Response:
        """Record a call, have it executed, and tell the client its id."""
        await self.sessions.sign(model.session if model else self._ledger.session_of(call.owner))
        there = await self._add(tenant, call, model)
        fault_point("service.received")
        answer: dict[str, Any] = {"request_id": there.id}
        if call.kind == SAMPLE:
            count = json.loads(call.body or b"{}").get("num_samples", 1)
            answer["sample_sequence_ids"] = [f"{call.id}:{number}" for number in range(count)]
        else:
            answer["model_id"] = call.owner
        return web.json_response(answer)

    async def _add(
        self, tenant: TenantConfig, call: ServiceCall, model: ModelRecord | None = None
    ) -> ServiceCall:
        there = await asyncio.to_thread(
            self._ledger.add, call, most=tenant.calls, model=model, models=tenant.models
        )
        if there is call:  # and not one that was sent before
            assert self._worker is not None, "it has begun"
            if call.kind == SAMPLE:
                self._begin_sample(call)
            else:
                self._worker.submit(call)
        return there

    # Samples

    async def _sample(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        body = await body_of(request)
        if self._sampler is None:
            raise CallRefused("this service does not sample (sampling = 'off')")
        SampleAsked.of(body)
        sampler = body.get("sampling_session_id")
        if sampler is None:  # a session of its own, for clients that know none
            sampler, path = f"{tenant.name}:sample:{secrets.token_hex(12)}", body.get("model_path")
            if path is None:
                self._check_name(body.get("base_model"))
            else:
                self._ledger.checkpoint(path, tenant.name)
            self._ledger.add_sampler(sampler, tenant.name, "", path)
        self._ledger.sampler(sampler, tenant.name)
        seq = body.get("seq_id")
        seq = self._ledger.next_seq(sampler) if seq is None else taken(body, "seq_id", int)
        call = self._call(tenant, SAMPLE, sampler, seq, json.dumps(body, sort_keys=True).encode())
        return await self._answered(tenant, call)

    def _begin_sample(self, call: ServiceCall) -> None:
        task = asyncio.create_task(self._do_sample(call))
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)

    async def _do_sample(self, call: ServiceCall) -> None:
        """Have a call answered by the server, and record the answer."""
        state = FAILED
        try:
            if self._sampler is None:
                raise CallRefused("this service does not sample (sampling = 'off')")
            asked = SampleAsked.of(json.loads(call.body or b"{}"))
            if not asked.stop_tokens and not asked.stop_texts:
                asked = asked.ending_with(self._end_tokens)
            path, weights, version = self._ledger.sampler(call.owner, call.tenant), None, "base"
            if path is not None:
                saved = self._ledger.checkpoint(path, call.tenant)
                weights, version = Path(self._config.output_dir) / saved.folder, saved.call
            answer = await self._sampler.sample(asked, weights, version, call.id)
            state = DONE
        except CallRefused as error:
            answer = failure(str(error), "user")
        except ServerUnavailable as error:
            answer = failure(f"the inference server does not answer: {error}", "server")
        except Exception as error:
            logger.exception("call %s failed", call.id)
            answer = failure(f"the service failed: {type(error).__name__}: {error}", "server")
        await asyncio.to_thread(self._ledger.finish, call, state, answer)
        self._wake(call.id)

    # Answers

    async def _retrieve(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        """The answer to a call, once it is there; 408 asks the client to ask again."""
        id = taken(await body_of(request), "request_id", str)
        end = time.monotonic() + POLL_SECONDS
        while (call := self._ledger.call(id, tenant.name)).state == WAITING:
            event = self._events.setdefault(id, asyncio.Event())
            if self._ledger.call(id, tenant.name).state != WAITING:  # it was finished in between
                self._wake(id)
                continue
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await event.wait()
            except TimeoutError:
                body = {
                    "type": "try_again",
                    "request_id": id,
                    "queue_state": "active",
                    "queue_state_reason": None,
                }
                return web.json_response(body, status=408)
        assert call.answer is not None, "the ledger has said so"
        if call.state == FAILED or call.kind not in (PASS, FORWARD, SAMPLE):
            return web.Response(body=call.answer, content_type="application/json")
        if PROTO in request.headers.get("Accept", ""):
            return web.Response(body=call.answer, content_type=PROTO)
        return web.json_response((sampled_json if call.kind == SAMPLE else passed_json)(call.answer))


def _unpacked(body: bytes) -> bytes:
    """A body that was compressed.

    Raises:
        CallRefused: it is too large, or damaged.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            whole = reader.read(LARGEST_BODY + 1)
    except zstandard.ZstdError as error:
        raise CallRefused(f"the body is not zstd, as Content-Encoding says: {error}") from None
    if len(whole) > LARGEST_BODY:
        raise CallRefused(f"the body has more than {LARGEST_BODY} bytes", 413)
    return whole
