"""vLLM plugin: what a run asks for when it gives the server a policy, and what each way of taking one is.

Runs inside vLLM's API process only.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.logger import init_logger

from cairn.inference.plugin.staging import Staged, Staging
from cairn.inference.plugin.weight_files import UnusableWeights, identities
from cairn.policy.errors import Altered, Gone, NotHeld, NotThere, Unchanged, Unfit
from cairn.policy.generation import DIRECT, Relay, Route

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CODES = {UnusableWeights.mark: 422, Altered.mark: 412, Gone.mark: 410, NotThere.mark: 503}
"""Status codes for weights that were not loaded, by the mark of the reason."""


class WeightUpdate(BaseModel):
    """Body of `POST /cairn/update_weights`."""

    # A directory, as this machine sees it, or the URL of a version in an object store.
    path: str = Field(min_length=1)
    version: str = Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")
    # Whether requests in flight keep the keys and values that the old weights made of their tokens.
    keep_cache: bool = False
    # How many adapters new requests may name, this one included, on a server that computes them unmerged.
    kept: int = Field(default=2, ge=2)
    # How it gets here from the trainer's memory, and on to other servers.
    route: Route = DIRECT


@dataclass
class PolicyUpdate:
    """An update that is under way. before: the version that is served until it is done. relay: where the
    server hands the policy on, if it does. relayed: whether it got it from another server. came: bytes that
    it has read or received of it, if that is known. start_differs: parameters that the server's start has
    loaded otherwise; None: that was not compared."""

    version: str
    before: str
    relay: Relay | None = None
    relayed: bool = False
    came: int | None = None
    start_differs: list[str] | None = None
    since: float = field(default_factory=time.monotonic)
    pauses: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when generation is about to be paused; from then on the engine answers no questions."""


class NotTaken(Exception):
    """The server has not taken a policy; `code` is the status code of the answer that says so."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code = code

    @classmethod
    def because(cls, error: Unchanged) -> "NotTaken":
        """For a reason that left everything as it was."""
        return cls(CODES[error.mark], str(error).removeprefix(error.mark))


class Updates(ABC):
    """How a server takes the policies that it is given, one after the other."""

    @abstractmethod
    async def version(self) -> str:
        """The policy that it has; `"default"` before there was one. Asks the engine."""

    @property
    @abstractmethod
    def adapter(self) -> str | None:
        """What requests have to give as their `model` to be answered from `version`; None: nothing."""

    @property
    @abstractmethod
    def must_name(self) -> Collection[str] | None:
        """Of which every request has to give one as its `model`; None: of none."""

    @abstractmethod
    async def take(self, update: WeightUpdate, noted: PolicyUpdate) -> str:
        """Take a policy; returns what `version` is from then on: that of the update.

        Args:
            noted: notified when generation is about to be paused, and told how the policy came.

        Raises:
            NotTaken: it can't; the code says in which state the server is left.
        """


# Policies that replace the weights of the model, while generation is paused.


logger = init_logger("vllm.cairn")


class StartWeights:
    """Compares what the server's start has loaded with what its first update loads, if both are of the same
    files.

    vLLM's own loader has put the first weights there, and an update goes another way (`loading.py`). Both
    end in the same layout, whichever kernels compute from it, so vLLM's digests of all parameters are equal
    if and only if the bytes are. Each of the two readings takes about a second for 2 GB of a worker's
    parameters.
    """

    def __init__(self, engine: "AsyncLLM"):
        """Of an engine that has loaded its model, and had no update."""
        self._engine = engine
        self._files = identities(engine.model_config.model)
        self._before: list[dict[str, str]] | None = None

    async def begin_update(self, path: str) -> None:
        """An update from the folder or URL `path` is about to change the parameters."""
        files, self._files = self._files, []  # later updates replace what updates have loaded
        self._before = await self._digests() if files and identities(path) == files else None

    async def end_update(self) -> list[str] | None:
        """The parameters that the start had loaded otherwise, each with the rank of its worker; None: the
        update was not the first one, or of other files, or vLLM gives no digests."""
        before, self._before = self._before, None
        after = await self._digests() if before is not None else None
        if before is None or after is None:
            return None
        found = differing(before, after)
        if found:
            names = f"{len(found)} parameters: {', '.join(found)}"
            logger.warning("the start had loaded other values from the same files into %s", names)
        return found

    async def _digests(self) -> list[dict[str, str]] | None:
        """Of all parameters of each worker; None if vLLM gives none, which is no reason to fail an update."""
        try:
            return await self._engine.compute_weight_checksums()
        except Exception as error:
            logger.warning("what the start has loaded is not compared: %r", error)
            return None


def differing(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> list[str]:
    """The parameters with another digest, or none, in one of two readings of all workers."""
    one, other = ({k: v for worker in reading for k, v in worker.items()} for reading in (before, after))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class Swapping(Updates):
    """Reads and checks weights, and puts them into the engine's place between two steps of generation."""

    def __init__(self, engine: "AsyncLLM", folder: Path):
        """Take policies from now on; `folder`: where to put what is downloaded."""
        self._engine = engine
        self._staging = Staging(engine.model_config, folder)
        self._start = StartWeights(engine)
        # Of data-parallel engines, too, each has workers that load on their own.
        self._alone = engine.vllm_config.parallel_config.world_size_across_dp == 1

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
            staged = await asyncio.to_thread(self._staging.prepare, update.path, update.route)
        except Unchanged as error:
            raise NotTaken.because(error) from None
        except Exception as error:  # nothing has been touched, whatever it was
            logger.exception("cannot prepare %s", update.path)
            raise NotTaken(422, f"{update.path}: {error!r}") from None
        noted.relay, noted.relayed, noted.came = staged.relay, staged.relayed, staged.came
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
            await self._start.begin_update(update.path)
            await self._engine.start_weight_update()
        except Exception as error:
            if not was_paused:
                await self._engine.resume_generation()
            raise NotTaken(409, f"cannot start a weight update: {error}") from error
        try:
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=staged.update_info))
            await self._engine.finish_weight_update(update.version)
            noted.start_differs = await self._start.end_update()
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
