"""Going back to a checkpoint when an update spikes (`spike.on_spike`)."""

import logging
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import CheckpointStore
from cairn.config.trainer import TrainerBase
from cairn.run import heartbeat
from cairn.run.directory import RunDirectory
from cairn.run.faults import fault_point
from cairn.run.history import Rewind, rewind_target
from cairn.run.messages import Attempt
from cairn.trainer.checkpoints import Checkpoints
from cairn.trainer.spikes import TrainingDiverged
from cairn.trainer.state import TrainerState

logger = logging.getLogger(__name__)


class Rewinder:
    """What becomes of a step in which an update spikes; all ranks ask together.

    This class itself is for a run that leaves single updates out, and never goes back.
    """

    def known(self, step: int, update: int) -> str | None:
        """Why an update spiked when the step was made before; None if it did not, or never was."""
        return None

    def rewind(self, step: int, update: int, reason: str) -> int | None:
        """Go back because of `update` of `step`; the step whose weights are there now.

        None, with everything as it was, if only this update is to be left out.
        """
        return None


class Rewinds(Rewinder):
    """Goes back to the checkpoint of a step, and passes over all batches from there through the present one.

    Only weights and the optimisers' state go back. Step numbers, learning rates, the position in the data
    and, in RL, policy versions and batches go on, so that neither checkpoints nor other roles know of it.
    """

    def __init__(self, state: TrainerState, run: RunDirectory, attempt: Attempt, checkpoints: Checkpoints):
        """Read what an earlier process went back for, after the checkpoint that this one goes on from."""
        ckpt = state.config.ckpt
        self._interval = (ckpt and ckpt.interval) or 0  # the configuration asks for it
        self._state, self._attempt, self._checkpoints = state, attempt, checkpoints
        self._log = run.rewinds
        self._store = CheckpointStore(run.checkpoints)
        self._most = state.config.spike.max_in_a_row
        mine = [one for one in self._log.of(attempt) if one.step > state.progress.step]
        self._known: list[Rewind] = state.group.gather_objects(mine)[0]

    def known(self, step: int, update: int) -> str | None:
        return next((one.reason for one in self._known if (one.step, one.update) == (step, update)), None)

    def rewind(self, step: int, update: int, reason: str) -> int | None:
        """Go back; None if no step of the run can be gone back to yet.

        Raises:
            TrainingDiverged: it went back to that step too often.
            CheckpointError: the checkpoint can't be loaded.
        """
        self._checkpoints.wait()
        known = next((one for one in self._known if (one.step, one.update) == (step, update)), None)
        to = known.to if known else rewind_target(step, self._interval)
        group, rewinds = self._state.group, self._state.rewinds
        if not group.gather_objects(to > 0 and self._store.exists(to))[0]:
            logger.warning("step %d: there is no checkpoint of step %d to go back to yet", step, to)
            return None
        if len(rewinds) >= self._most and all(one.to == to for one in rewinds[-self._most :]):
            raise TrainingDiverged(
                f"step {step}: {reason}, after the run went back to step {to} {self._most} times in a row "
                "(spike.max_in_a_row); lower optimizer.lr, or raise spike.grad_norm"
            )
        rewinds.append(Rewind(step, update, to, reason))
        if known is None and group.rank == 0:
            later = [one for one in self._known if one.step > step]
            self._log.write(self._attempt, [*rewinds, *later])
        group.barrier()
        fault_point("trainer.rewind")
        heartbeat.doing(f"going back to step {to}")
        self._load(self._store.folder(to))
        logger.warning(
            "step %d: back to the weights of step %d: %s; the batches of steps %d to %d change nothing",
            step, to, reason, to + 1, step,
        )  # fmt: skip
        return to

    def _load(self, folder: Path) -> None:
        try:
            self._state.go_back(folder)
        except CheckpointError as error:  # Damaged would blame the checkpoint that the attempt began from
            raise CheckpointError(f"going back to {folder}, as spike.on_spike asks: {error}") from error


def make_rewinder(
    config: TrainerBase, state: TrainerState, run: RunDirectory, attempt: Attempt, checkpoints: Checkpoints
) -> Rewinder:
    """What `spike.on_spike` asks for; all ranks call it."""
    rewinds = config.spike.on_spike == "rewind"
    return Rewinds(state, run, attempt, checkpoints) if rewinds else Rewinder()
