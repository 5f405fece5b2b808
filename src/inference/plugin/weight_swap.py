"""vLLM plugin: policies that replace the weights of the model, while generation is paused.

Runs inside vLLM's API process only.
"""

import asyncio
from typing import TYPE_CHECKING

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.logger import init_logger

from cairn.inference.plugin.staging import Staged, Staging
from cairn.inference.plugin.updates import CODES, NotTaken, PolicyUpdate, Updates, WeightUpdate
from cairn.inference.plugin.weight_files import UnusableWeights
from cairn.policy.errors import Altered, NotHeld, Unchanged, Unfit

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger("vllm.cairn")


class Swapping(Updates):
    """Reads and checks weights, and puts them into the engine's place between two steps of generation."""

    def __init__(self, engine: "AsyncLLM"):
        self._engine = engine
        self._staging = Staging(engine.model_config)
        parallel = engine.vllm_config.parallel_config
        self._alone = parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1

    async def version(self) -> str:
        return await self._engine.get_weight_version()

    @property
    def adapter(self) -> None:
        return None

    @property
    def must_name(self) -> None:
        return None

    async def take(self, update: WeightUpdate, noted: PolicyUpdate) -> str:
        """See `Updates`. Requests in flight go on under the new weights."""
        try:
            staged = await asyncio.to_thread(self._staging.prepare, update.path)
        except Unchanged as error:
            raise NotTaken.because(error) from None
        except Exception as error:  # nothing has been touched, whatever it was
            logger.exception("cannot prepare %s", update.path)
            raise NotTaken(422, f"{update.path}: {error!r}") from None
        with staged:
            return await self._swap(update, staged, noted)

    async def _swap(self, update: WeightUpdate, staged: Staged, noted: PolicyUpdate) -> str:
        """Put prepared weights into the engine's place while generation is paused."""
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
            raise NotTaken(409, f"cannot start a weight update: {error}") from error
        try:
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=staged.update_info))
            await self._engine.finish_weight_update(update.version)
        except Exception as error:
            # Others of several workers may have loaded what one of them has not found any more.
            may_be_mixed = staged.is_prepared and not self._alone
            raise await self._failed(error, was_paused, may_be_mixed=may_be_mixed) from error
        # A busy engine would answer after its next step.
        version = await self._engine.get_weight_version()
        await self._engine.resume_generation()
        return version

    async def _failed(self, error: Exception, was_paused: bool, *, may_be_mixed: bool) -> NotTaken:
        """Why an update failed; resumes generation if nothing was changed."""
        mark = next((mark for mark in CODES if mark in str(error) and not may_be_mixed), None)
        # Another process of a server with several may have got the weights just before they were gone.
        if mark and (mark in (UnusableWeights.mark, Altered.mark) or self._alone):
            if not was_paused:
                await self._engine.resume_generation()
        else:
            logger.exception("weight update failed", exc_info=error)
            await self._engine.update_weight_version("unknown")
        if mark:
            return NotTaken(CODES[mark], str(error).partition(mark)[2])
        if NotHeld.mark in str(error):
            return NotTaken(
                412, f"the server does not hold what came: {str(error).partition(NotHeld.mark)[2]}"
            )
        if Unfit.mark in str(error):
            return NotTaken(501, str(error).partition(Unfit.mark)[2])
        return NotTaken(
            500, f"the update failed half-way, generation is paused; push again or restart: {error}"
        )
