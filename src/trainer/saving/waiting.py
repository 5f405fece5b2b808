"""What exports, uploads and the guard against spikes mean for retention: steps that they need are spared."""

import logging
import time
from collections.abc import Collection, Mapping
from typing import Protocol

from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.export import ExportConfig
from cairn.formats.transfer.export_folder import run_exports
from cairn.remote.uploads import RunUploads
from cairn.run.history import PREFIX
from cairn.run.rewinds import spared_for_rewinds
from cairn.trainer.state import Context

logger = logging.getLogger(__name__)

SAY_SECONDS = 30.0
"""Between two warnings about steps that are not uploaded, which may be many."""


class Waiting(Protocol):
    """Work beside the run that some steps wait for."""

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that stay although no rule keeps them; see `retention.Spare`."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """How many steps waited, and how many of them no rule kept, when the newest step was committed."""
        ...


class AllWaiting:
    """All such work, by the settings of checkpoints."""

    def __init__(self, context: Context, ckpt: CkptConfig):
        self._parts: list[Waiting] = []
        if ckpt.export is not None:
            self._parts.append(ExportsWaiting(context, ckpt.export))
        if ckpt.remote is not None:
            self._parts.append(UploadsWaiting(context, ckpt))
        if context.state.config.spike.on_spike == "rewind" and ckpt.interval:
            self._parts.append(RewindsWaiting(CheckpointStore(context.run.checkpoints), ckpt.interval))

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """What any of it needs."""
        return {step for part in self._parts for step in part.spare(unkept)}

    def metrics(self) -> Mapping[str, float]:
        """Those of all."""
        return {name: value for part in self._parts for name, value in part.metrics().items()}


class RewindsWaiting:
    """Spares the step that a spike in the next one would go back to."""

    def __init__(self, store: CheckpointStore, interval: int):
        self._store, self._interval = store, interval

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """That step; see `retention.Spare`."""
        return spared_for_rewinds(unkept, self._store.latest() or 0, self._interval)

    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}


class ExportsWaiting:
    """Spares steps that wait to be exported, as many as the settings allow, and says so."""

    def __init__(self, context: Context, config: ExportConfig):
        self._run = context.run
        self._store = CheckpointStore(context.run.checkpoints)
        self._exports = run_exports(config, last=context.state.config.max_steps, attempt=context.attempt.id)
        self._waiting = 0
        self._spared: frozenset[int] = frozenset()

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that stay although no rule keeps them; see `retention.Spare`."""
        self._waiting = len(self._exports.waiting(self._store))
        hold = self._exports.hold(self._store, unkept)
        for step in sorted(hold.kept - self._spared):
            logger.info("step %d stays until it is exported, although no rule keeps it", step)
        for step in sorted(hold.missed):
            reason = (
                f"{len(hold.kept)} other steps wait already, as many as --ckpt.export.max-waiting allows, so "
                "retention deletes it"
            )
            logger.warning("step %d is not exported: %s", step, reason)
            self._run.history.not_exported(step, reason)
        self._spared = hold.kept
        return hold.kept

    def metrics(self) -> Mapping[str, float]:
        """How many steps waited, and how many of them no rule kept, when the newest step was committed."""
        return {
            f"{PREFIX}exports_waiting": self._waiting,
            f"{PREFIX}exports_spared": len(self._spared),
        }


class UploadsWaiting:
    """Spares steps that wait to be uploaded, as many as the settings allow, and says so."""

    def __init__(self, context: Context, ckpt: CkptConfig):
        self._run = context.run
        store = CheckpointStore(context.run.checkpoints)
        self._uploads = RunUploads(store, ckpt, context.state.config.max_steps)
        self._most = ckpt.remote_max_waiting
        self._lost: list[int] = []
        self._say_at = 0.0
        self._waiting = 0
        self._spared: frozenset[int] = frozenset()

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """See `Waiting`."""
        self._waiting = len(self._uploads.waiting())
        hold = self._uploads.hold(unkept)
        for step in sorted(hold.kept - self._spared):
            logger.info("step %d stays until it is uploaded, although no rule keeps it", step)
        self._lost += sorted(hold.missed)
        if self._lost and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_SECONDS
            steps, self._lost = self._lost, []
            number = f", nor are {len(steps) - 1} steps before it" if len(steps) > 1 else ""
            reason = (
                f"uploads are slower than saves, and --ckpt.remote-max-waiting is {self._most}, so retention "
                f"deletes it{number}"
            )
            logger.warning("step %d is not uploaded: %s", steps[-1], reason)
            self._run.history.not_uploaded(steps[-1], reason)
        self._spared = hold.kept
        return hold.kept

    def metrics(self) -> Mapping[str, float]:
        """See `Waiting`."""
        return {
            f"{PREFIX}uploads_waiting": self._waiting,
            f"{PREFIX}uploads_spared": len(self._spared),
        }
