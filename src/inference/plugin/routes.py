"""vLLM plugin: the routes with which a run puts its weights into the server, behind the server's token.

Runs inside vLLM's API process only.
"""

import asyncio
import contextlib
import os
import time
import uuid
from argparse import Namespace
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import vllm
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.rl.online.api_router import router as rl_router

from cairn.inference.client import ASLEEP, EPOCH_VARIABLE, TOKEN_VARIABLE
from cairn.inference.plugin.adapters import AdapterCopies, Unmerged
from cairn.inference.plugin.middleware import (
    AsleepGuard,
    CountingRequests,
    Guard,
    NamedOnly,
    OpenRequests,
    Sleep,
    failure,
)
from cairn.inference.plugin.updates import NotTaken, PolicyUpdate, Swapping, Updates, WeightUpdate
from cairn.inference.vllm_command import EXPERTS_SCHEDULER, copies_folder, samples_of
from cairn.run.machine import this_machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

Status = dict[str, Any]

HOW_TO_GET_THE_TOKEN = (
    f"clients take it from {TOKEN_VARIABLE} or from the file that the server leaves for its own user"
)


class CairnRoutes:
    """Endpoint plugin: vLLM's RL routes, `/cairn/update_weights`, `/cairn/sleep`, `/cairn/wake`,
    `/cairn/status`, and a guard before all."""

    name = "cairn"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._token = os.environ[TOKEN_VARIABLE]
        self._epoch = os.environ.get(EPOCH_VARIABLE) or uuid.uuid4().hex
        self._one_at_a_time = asyncio.Lock()
        self._update: PolicyUpdate | None = None
        self._given = "", ""
        """The version that was given last, and the folder or URL that it came from."""
        self._sleep = Sleep()
        self._requests = OpenRequests()

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(rl_router)
        app.add_api_route("/cairn/update_weights", self.update_weights, methods=["POST"])
        app.add_api_route("/cairn/sleep", self.sleep, methods=["POST"])
        app.add_api_route("/cairn/wake", self.wake, methods=["POST"])
        app.add_api_route("/cairn/status", self.status, methods=["GET"])
        app.add_middleware(NamedOnly, names=lambda: self._updates.must_name)
        app.add_middleware(CountingRequests, requests=self._requests)
        app.add_middleware(AsleepGuard, sleep=self._sleep)  # behind the guard, which is added last
        app.add_middleware(Guard, token=self._token, how_to_get_it=HOW_TO_GET_THE_TOKEN)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        assert engine_client is not None  # "generate" is required
        self._engine = cast("AsyncLLM", engine_client)  # the only one there is
        self._model = args.model
        # vLLM's arguments hold only what was given; this is also what vLLM has chosen by itself.
        self._max_num_seqs = self._engine.vllm_config.scheduler_config.max_num_seqs
        self._gpus = gpus_of(self._engine.vllm_config)
        # Weights that are replaced may be any; those that adapters are computed beside must be their base.
        self._base = samples_of(Path(args.model)) if self._engine.vllm_config.lora_config else None
        self._updates = self._ways_of(args.model, state)

    def _ways_of(self, model: str, state: State) -> Updates:
        """How this server takes policies."""
        config, folder = self._engine.vllm_config, copies_folder(self._epoch)
        if config.lora_config is None:
            return Swapping(self._engine, folder)
        rank = config.lora_config.max_lora_rank
        copies = AdapterCopies(model, config.model_config.dtype, rank, folder)
        return Unmerged(self._engine, state.openai_serving_models, self._requests, copies)

    async def status(self) -> Status:
        """Version of the weights, and the id of this start of the server.

        The engine is asked, which shows that it is alive. While it is paused for an update it answers
        nothing. As long as an update is under way, the status says so, and for how many seconds it has been.
        """
        update = self._update
        if update is None:
            paused, version = await self._state()
            return self._status(version, paused=paused)
        state, pauses = asyncio.ensure_future(self._state()), asyncio.ensure_future(update.pauses.wait())
        try:
            await asyncio.wait({state, pauses}, return_when=asyncio.FIRST_COMPLETED)
            paused, version = state.result() if state.done() else (True, update.before)
        finally:
            state.cancel()
            pauses.cancel()
        seconds = time.monotonic() - update.since
        return self._status(version, paused=paused) | {
            "updating": {"version": update.version, "seconds": seconds}
        }

    async def _state(self) -> tuple[bool, str]:
        """Whether generation is paused, and the weights' version, as the engine says."""
        return await self._engine.is_paused(), await self._updates.version()

    def _status(self, version: str, *, paused: bool) -> Status:
        lora = self._engine.vllm_config.lora_config
        return {
            "weight_version": version,
            "path": self._given[1] if self._given[0] == version else None,
            "adapter": self._updates.adapter,
            "max_lora_rank": lora and lora.max_lora_rank,
            "max_loras": lora and lora.max_loras,
            "experts": _tells_experts(self._engine.vllm_config),
            "base": self._base,
            "epoch": self._epoch,
            "model": self._model,
            "paused": paused,
            "asleep": self._sleep.asleep,
            "max_num_seqs": self._max_num_seqs,
            "max_model_len": self._engine.model_config.max_model_len,
            "dtype": str(self._engine.model_config.dtype).removeprefix("torch."),
            "gpus": self._gpus,
            "vllm_version": vllm.__version__,
        }

    async def sleep(self) -> JSONResponse:
        """Free the GPU's memory until `wake`; requests in flight wait. 200: done, answered as by `status`."""
        async with self._one_at_a_time:
            try:
                await self._sleep.begin(self._engine)
            except Exception as error:
                return failure(500, f"cannot fall asleep; generation is refused: {error}")
            return JSONResponse(await self.status())

    async def wake(self) -> JSONResponse:
        """Go on with the weights that the server had. 200: done, answered as by `status`."""
        async with self._one_at_a_time:
            try:
                await self._sleep.end(self._engine)
            except Exception as error:
                return failure(500, f"cannot wake up; generation is refused: {error}")
            return JSONResponse(await self.status())

    async def update_weights(self, update: WeightUpdate) -> JSONResponse:
        """Take a policy; see `Swapping`, and `Unmerged` for a server that computes adapters.

        What comes is read and checked before anything is changed.

        200: they are loaded; the answer is that of `status`, with `relay`, where this server hands the policy
        on to others if the update asks for it, `relayed`, whether another one did so, `came`, how many bytes
        of it were read or received, and `start_differs` (see `StartWeights`). 422: the weights were refused,
        the old ones serve on. 412: they are not those that the trainer published; the old ones serve on if
        they have changed on their way, it is as with 500 if they have changed in the server. 409: somebody
        else's update is open. 410: the trainer that was to send them has newer ones; 503: it does not have
        them yet, or has not sent all. 500: the update failed half-way; generation stays paused, since the
        weights may be a mixture, until an update succeeds. 501: likewise, and no update can succeed.
        """
        async with self._one_at_a_time:
            if self._sleep.asleep:  # since this request came in
                return failure(503, ASLEEP)
            with self._noted(PolicyUpdate(update.version, await self._updates.version())) as noted:
                try:
                    version = await self._updates.take(update, noted)
                except NotTaken as reason:
                    return failure(reason.code, str(reason))
                self._given = version, update.path
                relay = noted.relay and asdict(noted.relay)
                came = {"relay": relay, "relayed": noted.relayed, "came": noted.came}
                came |= {"start_differs": noted.start_differs}
                return JSONResponse(self._status(version, paused=False) | came)

    @contextlib.contextmanager
    def _noted(self, update: PolicyUpdate) -> Generator[PolicyUpdate]:
        """For `status`: the update is under way inside the block."""
        self._update = update
        try:
            yield update
        finally:
            self._update = None


def _tells_experts(config: "VllmConfig") -> bool:
    """Whether answers have the experts of their tokens, in one of two ways."""
    on_cpu = config.scheduler_config.scheduler_cls == EXPERTS_SCHEDULER
    return on_cpu or config.aux_output_config.enable_return_routed_experts


def gpus_of(config: "VllmConfig") -> list[str]:
    """UUIDs of the GPUs that vLLM uses: the first that this process sees, one for each worker."""
    if config.device_config.device_type != "cuda":
        return []
    return [gpu.uuid for gpu in this_machine().gpus[: config.parallel_config.world_size_across_dp]]
