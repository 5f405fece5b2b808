"""What the parts of an orchestrator share: what they work with, and how far they have come."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import SingleTurn
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.servers import PolicyServers
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory
from cairn.run.messages import ShippedBatch


@dataclass(frozen=True)
class ShippingProgress:
    """How far the orchestrator has come: batches shipped, one a step, and what was in them."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0

    def after(self, batch: ShippedBatch) -> "ShippingProgress":
        """Where the next batch leads."""
        return ShippingProgress(
            batch.step,
            self.total_tokens + batch.tokens,
            self.total_samples + batch.samples,
            self.total_problems + batch.problems,
        )


class ShippedSteps:
    """The progress after each step whose batch is shipped, beginning where the run was taken up."""

    def __init__(self, beginning: ShippingProgress):
        self._by_step = {beginning.step: beginning}
        self.newest = beginning
        """After the newest batch."""

    def add(self, batch: ShippedBatch) -> None:
        """Record that the batch of the next step is shipped."""
        self.newest = self._by_step[batch.step] = self.newest.after(batch)

    def at(self, step: int) -> ShippingProgress | None:
        """The progress after `step`; None if it is before where the run was taken up, or forgotten."""
        return self._by_step.get(step)

    def forget_before(self, step: int) -> None:
        """Forget the progress before `step`."""
        self._by_step = {later: progress for later, progress in self._by_step.items() if later >= step}


@dataclass
class ServedPolicy:
    """The policy that the servers have."""

    step: int | None = None
    """Optimiser steps that made it; None until they have one."""
    versions: set[str] = field(default_factory=set[str])
    """Names of the policies that tokens may come from now."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the servers have another one, or an answer is there: whoever makes batches looks again."""


class Disk:
    """Runs what waits for the disk in one thread, in order, so that the event loop goes on meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def do(self, write: Callable[..., None], *arguments: object) -> None:
        """Call `write` there, and wait until it has returned."""
        await asyncio.get_running_loop().run_in_executor(self._thread, write, *arguments)

    def close(self) -> None:
        """Wait until all of it is done."""
        self._thread.shutdown()


@dataclass(frozen=True)
class OrchestratorState:
    """What all parts of an orchestrator work with."""

    config: OrchestratorConfig
    attempt: Attempt
    run: RunDirectory
    store: CheckpointStore
    recipe: dict[str, Any]
    """The orchestrator's part of it."""
    environment: SingleTurn
    servers: PolicyServers
    ledger: Ledger
    shipped: ShippedSteps
    policy: ServedPolicy = field(default_factory=ServedPolicy)
    disk: Disk = field(default_factory=Disk)
