"""The state that the parts of an orchestrator share."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.prompts.sources import PromptSource
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.servers import PolicyServers
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt, ShippedBatch

Result = TypeVar("Result")


@dataclass(frozen=True)
class ShippingProgress:
    """The orchestrator's progress: steps whose batches are shipped, and totals over these batches."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0

    def after(self, batch: ShippedBatch) -> "ShippingProgress":
        """The progress after shipping `batch` as well."""
        return ShippingProgress(
            batch.step,
            self.total_tokens + batch.tokens,
            self.total_samples + batch.samples,
            self.total_problems + batch.problems,
        )


class ShippedSteps:
    """The progress after each shipped step, beginning at the step where the run was taken up."""

    def __init__(self, beginning: ShippingProgress):
        self._by_step = {beginning.step: beginning}
        self.newest = beginning
        """The progress after the newest batch."""

    def add(self, batch: ShippedBatch) -> None:
        """Record that the batch of the next step is shipped."""
        self.newest = self._by_step[batch.step] = self.newest.after(batch)

    def at(self, step: int) -> ShippingProgress | None:
        """The progress after `step`; None if that is before the run was taken up, or forgotten."""
        return self._by_step.get(step)

    def forget_before(self, step: int) -> None:
        """Forget the progress before `step`."""
        self._by_step = {later: progress for later, progress in self._by_step.items() if later >= step}


@dataclass
class ServedPolicy:
    """The policy that the servers have loaded."""

    step: int | None = None
    """Optimiser steps of the policy; None until the servers have loaded one."""
    versions: set[str] = field(default_factory=set[str])
    """Names of the policy versions that tokens may come from."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the servers have loaded a policy or a group is complete: wakes the batch maker."""


class Disk:
    """Reads and writes files one after the other in a thread, so that the event loop is not blocked."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def do(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Call `work` in the thread; returns what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """Wait until all of them are done."""
        self._thread.shutdown()


@dataclass(frozen=True)
class OrchestratorState:
    """What all parts of an orchestrator share."""

    config: OrchestratorConfig
    attempt: Attempt
    run: RunDirectory
    store: CheckpointStore
    recipe: dict[str, Any]
    """The orchestrator's part of the run's recipe."""
    sources: list[PromptSource]
    """Its environments; an `AnswerGroup` has the number of its own."""
    servers: PolicyServers
    ledger: Ledger
    shipped: ShippedSteps
    evaluated: dict[str, float] = field(default_factory=dict[str, float])
    """Results of evaluations that no batch's metrics hold yet."""
    policy: ServedPolicy = field(default_factory=ServedPolicy)
    disk: Disk = field(default_factory=Disk)

    def source(self, group: AnswerGroup) -> PromptSource:
        """The environment of a group."""
        return self.sources[group.environment]

    def take_evaluated(self) -> dict[str, float]:
        """The results of evaluations since the last call, for a step's row."""
        taken = dict(self.evaluated)
        self.evaluated.clear()
        return taken

    @functools.cached_property
    def rollouts(self) -> KeptRollouts:
        """The rollouts that were shipped."""
        return KeptRollouts(self.run.rollouts)
