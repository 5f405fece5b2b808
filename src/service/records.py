"""Requests that only look: at sessions, models, samplers and checkpoints, of the tenant who asks."""

import contextlib
import datetime
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from cairn.config.service import TenantConfig
from cairn.service.ledger import ServiceLedger
from cairn.service.schema import ModelRecord, SavedWeights
from cairn.service.wire import read_json, taken

Handler = Callable[[web.Request, TenantConfig], Awaitable[web.Response]]
"""What answers a request of a tenant."""
PAGE = 100
"""Entries of a list that are sent at a time, unless a request says otherwise."""


class RecordRoutes:
    """Answers such requests from the ledger."""

    def __init__(self, name: str, folder: Path, ledger: ServiceLedger):
        """Take the base's name and folder, where its tokenizer is."""
        self._name, self._folder, self._ledger = name, folder, ledger

    def gets(self) -> dict[str, Handler]:
        """What answers GET, by path."""
        return {
            "/sessions": self._sessions,
            "/sessions/{session}": self._session,
            "/samplers/{sampler}": self._sampler_info,
            "/training_runs": self._runs,
            "/training_runs/{model}": self._run,
            "/training_runs/{model}/checkpoints": self._checkpoints,
            "/checkpoints": self._all_checkpoints,
        }

    def posts(self) -> dict[str, Handler]:
        """What answers POST, by path."""
        return {"/get_info": self._info, "/weights_info": self._weights_info}

    async def _sessions(self, _: web.Request, tenant: TenantConfig) -> web.Response:
        return web.json_response({"sessions": self._ledger.sessions(tenant.name)})

    async def _session(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        session = request.match_info["session"]
        about = self._ledger.session(session, tenant.name)
        models = [one.id for one in self._ledger.models("session = ?", session)]
        answer = {"training_run_ids": models, "sampler_ids": self._ledger.samplers(session)}
        return web.json_response({**answer, "user_metadata": about.get("user_metadata")})

    async def _sampler_info(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        sampler = request.match_info["sampler"]
        path = self._ledger.sampler(sampler, tenant.name)
        return web.json_response({"sampler_id": sampler, "base_model": self._name, "model_path": path})

    async def _info(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        model = self._ledger.model(taken(await body_of(request), "model_id", str), tenant.name)
        about = {"arch": "lora", "model_name": self._name, "tokenizer_id": str(self._folder)}
        answer = {"type": "get_info", "model_data": about, "model_id": model.id, "model_name": self._name}
        return web.json_response({**answer, "is_lora": True, "lora_rank": model.lora["rank"]})

    async def _weights_info(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        saved = self._ledger.checkpoint(taken(await body_of(request), "tinker_path", str), tenant.name)
        lora = self._ledger.model(saved.model).lora
        answer = {
            "base_model": self._name,
            "is_lora": True,
            "lora_rank": lora["rank"],
            "train_unembed": False,
        }
        return web.json_response({**answer, "train_mlp": lora["train_mlp"], "train_attn": lora["train_attn"]})

    async def _runs(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        models = self._ledger.models("tenant = ?", tenant.name)
        page, cursor = _page(request, models)
        return web.json_response({"training_runs": [self._run_of(one) for one in page], "cursor": cursor})

    async def _run(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        return web.json_response(self._run_of(self._ledger.model(request.match_info["model"], tenant.name)))

    def _run_of(self, model: ModelRecord) -> dict[str, Any]:
        saved = self._ledger.checkpoints("model = ?", model.id)
        newest = {
            kind: next((_checkpoint(one) for one in saved if one.kind == kind), None)
            for kind in KINDS.values()
        }
        return {
            **{"training_run_id": model.id, "base_model": self._name, "model_owner": model.tenant},
            **{"is_lora": True, "lora_rank": model.lora["rank"], "user_metadata": model.metadata or None},
            **{"last_request_time": _time(model.created), "last_checkpoint": newest["training"]},
            "last_sampler_checkpoint": newest["sampler"],
        }

    async def _checkpoints(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        model = self._ledger.model(request.match_info["model"], tenant.name)
        return web.json_response(
            {"checkpoints": [_checkpoint(one) for one in self._ledger.checkpoints("model = ?", model.id)]}
        )

    async def _all_checkpoints(self, request: web.Request, tenant: TenantConfig) -> web.Response:
        page, cursor = _page(request, self._ledger.checkpoints("tenant = ?", tenant.name))
        return web.json_response({"checkpoints": [_checkpoint(one) for one in page], "cursor": cursor})


KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""What checkpoints are, by the second part of their paths."""


def _checkpoint(saved: SavedWeights) -> dict[str, Any]:
    return {
        **{
            "checkpoint_id": saved.path.split("/", 3)[3],
            "checkpoint_type": saved.kind,
            "tinker_path": saved.path,
        },
        **{"time": _time(saved.created), "size_bytes": saved.bytes, "public": False},
        **{"user_metadata": saved.metadata or None, "expires_at": saved.expires and _time(saved.expires)},
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _page(request: web.Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """The part of a list that a request asks for, by `offset` and `limit`."""
    offset, limit = 0, 100
    with contextlib.suppress(ValueError):
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", 100))
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[max(offset, 0) : max(offset, 0) + max(limit, 0)], cursor


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object that a request has as its body.

    Raises:
        CallRefused: it has none.
    """
    return read_json(await request.read())
