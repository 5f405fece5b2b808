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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import vllm
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import State
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.rl.online.api_router import router as rl_router
from vllm.logger import init_logger

from cairn.inference.client import ASLEEP, EPOCH_VARIABLE, TOKEN_VARIABLE
from cairn.inference.plugin.guard import Guard, failure
from cairn.inference.plugin.sleeping import AsleepGuard, Sleep
from cairn.inference.plugin.staging import Staged, Staging
from cairn.inference.plugin.weight_files import Refused
from cairn.policy.refusals import Altered, Gone, NotHeld, NotThere, Unchanged, Unfit
from cairn.run.machine import this_machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger("vllm.cairn")

Status = dict[str, Any]

HOW_TO_GET_THE_TOKEN = (
    f"clients take it from {TOKEN_VARIABLE} or from the file that the server leaves for its own user"
)
UNCHANGED = {Refused.mark: 422, Altered.mark: 412, Gone.mark: 410, NotThere.mark: 503}
"""Status codes for weights that were not loaded, by the mark of the reason."""


class WeightUpdate(BaseModel):
    """Body of `POST /cairn/update_weights`."""

    # A directory, as this machine sees it.
    path: str = Field(min_length=1)
    version: str = Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")
    # Whether requests in flight keep the keys and values that the old weights made of their tokens.
    keep_cache: bool = False


@dataclass
class Update:
    """An update that is under way. before: the version that is served until it is done."""

    version: str
    before: str
    since: float = field(default_factory=time.monotonic)
    pauses: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when generation is about to be paused; from then on the engine answers no questions."""


class CairnRoutes:
    """Endpoint plugin: vLLM's RL routes, `/cairn/update_weights`, `/cairn/sleep`, `/cairn/wake`,
    `/cairn/status`, and a guard before all."""

    name = "cairn"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._token = os.environ[TOKEN_VARIABLE]
        self._epoch = os.environ.get(EPOCH_VARIABLE) or uuid.uuid4().hex
        self._one_at_a_time = asyncio.Lock()
        self._update: Update | None = None
        self._sleep = Sleep()

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(rl_router)
        app.add_api_route("/cairn/update_weights", self.update_weights, methods=["POST"])
        app.add_api_route("/cairn/sleep", self.sleep, methods=["POST"])
        app.add_api_route("/cairn/wake", self.wake, methods=["POST"])
        app.add_api_route("/cairn/status", self.status, methods=["GET"])
        app.add_middleware(AsleepGuard, sleep=self._sleep)  # behind the guard, which is added last
        app.add_middleware(Guard, token=self._token, how_to_get_it=HOW_TO_GET_THE_TOKEN)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        assert engine_client is not None  # "generate" is required
        self._engine = cast("AsyncLLM", engine_client)  # the only one there is
        self._model = args.model
        # vLLM's arguments hold only what was given; this is also what vLLM has chosen by itself.
        self._max_num_seqs = self._engine.vllm_config.scheduler_config.max_num_seqs
        self._gpus = gpus_of(self._engine.vllm_config)
        self._staging = Staging(self._engine.model_config)
        self._alone = args.tensor_parallel_size == args.pipeline_parallel_size == 1

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
        return await self._engine.is_paused(), await self._engine.get_weight_version()

    def _status(self, version: str, *, paused: bool) -> Status:
        return {
            "weight_version": version,
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
        """Load weights between two steps of generation; requests in flight go on under the new ones.

        They are read and checked before generation is paused.

        200: they are loaded; the answer is that of `status`. 422: the weights were refused, the old ones
        serve on. 412: they are not those that the trainer published; the old ones serve on if they have
        changed on their way, it is as with 500 if they have changed in the server. 409: somebody else's
        update is open. 410: the trainer that was to send them has newer ones; 503: it does not have them
        yet, or has not sent all. 500: the update failed half-way; generation stays paused, since the weights
        may be a mixture, until an update succeeds. 501: likewise, and no update can succeed.
        """
        async with self._one_at_a_time:
            if self._sleep.asleep:  # since this request came in
                return failure(503, ASLEEP)
            with self._noted(Update(update.version, await self._engine.get_weight_version())) as noted:
                try:
                    staged = await asyncio.to_thread(self._staging.prepare, update.path)
                except Unchanged as error:
                    return failure(UNCHANGED[error.mark], str(error).removeprefix(error.mark))
                except Exception as error:  # nothing has been touched, whatever it was
                    logger.exception("cannot prepare %s", update.path)
                    return failure(422, f"{update.path}: {error!r}")
                with staged:
                    return await self._swap(update, staged, noted)

    @contextlib.contextmanager
    def _noted(self, update: Update) -> Generator[Update]:
        """For `status`: the update is under way inside the block."""
        self._update = update
        try:
            yield update
        finally:
            self._update = None

    async def _swap(self, update: WeightUpdate, staged: Staged, noted: Update) -> JSONResponse:
        """Put prepared weights into the engine's place while generation is paused; see `update_weights`."""
        was_paused = await self._engine.is_paused()
        noted.pauses.set()
        # vLLM's `pause_generation` sleeps 20 ms more, for answers to get out first; each names its
        # version, whenever it does. Clearing also has running requests recompute their keys and values,
        # which old weights have made.
        await self._engine.engine_core.pause_scheduler_async("keep", not update.keep_cache)
        try:
            await self._engine.start_weight_update()
        except Exception as error:
            if not was_paused:
                await self._engine.resume_generation()
            return failure(409, f"cannot start a weight update: {error}")
        try:
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=staged.update_info))
            await self._engine.finish_weight_update(update.version)
        except Exception as error:
            # Others of several workers may have loaded what one of them has not found any more.
            return await self._failed(error, was_paused, may_be_mixed=staged.is_prepared and not self._alone)
        # A busy engine would answer after its next step.
        status = self._status(await self._engine.get_weight_version(), paused=False)
        await self._engine.resume_generation()
        return JSONResponse(status)

    async def _failed(self, error: Exception, was_paused: bool, *, may_be_mixed: bool) -> JSONResponse:
        """Answer why an update failed, and resume generation if nothing was changed."""
        mark = next((mark for mark in UNCHANGED if mark in str(error) and not may_be_mixed), None)
        # Another process of a server with several may have got the weights just before they were gone.
        if mark and (mark in (Refused.mark, Altered.mark) or self._alone):
            if not was_paused:
                await self._engine.resume_generation()
        else:
            logger.exception("weight update failed", exc_info=error)
            await self._engine.update_weight_version("unknown")
        if mark:
            return failure(UNCHANGED[mark], str(error).partition(mark)[2])
        if NotHeld.mark in str(error):
            return failure(
                412, f"the server does not hold what came: {str(error).partition(NotHeld.mark)[2]}"
            )
        if Unfit.mark in str(error):
            return failure(501, str(error).partition(Unfit.mark)[2])
        return failure(
            500, f"the update failed half-way, generation is paused; push again or restart: {error}"
        )


def gpus_of(config: "VllmConfig") -> list[str]:
    """UUIDs of the GPUs that vLLM uses: the first that this process sees, one for each worker."""
    if config.device_config.device_type != "cuda":
        return []
    return [gpu.uuid for gpu in this_machine().gpus[: config.parallel_config.world_size_across_dp]]
