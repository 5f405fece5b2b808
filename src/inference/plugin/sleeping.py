"""vLLM plugin: the sleep of a server, which frees its GPU memory and keeps its weights and their version.

Runs inside vLLM's API process only.
"""

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.logger import init_logger

from cairn.inference.client import ASLEEP
from cairn.inference.plugin.auth import failure

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

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
