"""What a run's exports mean for retention: steps that wait for them are spared, within a bound."""

import logging
from collections.abc import Collection, Mapping

from cairn.checkpoint.exports import run_exports
from cairn.checkpoint.store import CheckpointStore
from cairn.config.export import ExportConfig
from cairn.run.history import PREFIX
from cairn.trainer.task import Context

logger = logging.getLogger(__name__)


class NothingWaits:
    """Of a run that exports nothing."""

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """None; see `retention.Spare`."""
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Nothing."""
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
