"""The trainer's side of RL: batches from the orchestrator, policy versions to it."""

import os
import shutil

from transformers import PreTrainedModel

from cairn.checkpoint.tensors import write_tensors
from cairn.config.trainer import TrainerConfig
from cairn.run.batches import Batch
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.faults import fault_point
from cairn.run.waiting import wait_for
from cairn.trainer.group import Group
from cairn.trainer.model import weights


class RLData:
    """Reads the orchestrator's batch files in order of steps."""

    def __init__(self, config: TrainerConfig, run: RunDirectory, attempt: Attempt):
        self.config = config
        self.run = run
        self.attempt = attempt

    def next_batch(self, step: int) -> Batch:
        """Wait for the batch of optimiser step `step`.

        Raises:
            DeadlinePassed: the orchestrator did not ship it in time.
        """
        batch = wait_for(
            lambda: self.run.batch(self.attempt, step),
            seconds=self.config.batch_timeout,
            whom=f"the orchestrator's batch {step}",
            setting="--trainer.batch-timeout",
        )
        fault_point("trainer.batch_read")
        return batch


class VersionPublisher:
    """Puts each policy version where the orchestrator finds it."""

    def __init__(self, run: RunDirectory, attempt: Attempt, group: Group):
        self.run = run
        self.attempt = attempt
        self.group = group
        self._newest = max(run.announced_versions(attempt), default=attempt.start_step)

    def is_replay(self, step: int) -> bool:
        """Whether the orchestrator was told of the policy of `step` before this process began.

        So it is when a trainer that died is started again and goes through the same batches.
        """
        return step <= self._newest

    def announced(self, step: int) -> tuple[bool, bool]:
        """Whether the orchestrator was told that `step` is a checkpoint, so it saves its part; and that the
        run ends there, so it ends too."""
        message = self.run.announced_version(self.attempt, step)
        return (message["save"], message["last"]) if message else (False, False)

    def publish(self, step: int, model: PreTrainedModel, *, save: bool, last: bool) -> None:
        """Write the weights after `step` optimiser steps, then announce them; all ranks call it.

        A version is written once, under a path of its own, and not changed while it is there: servers map
        the file. The orchestrator removes it when they have a newer one; the folder is then written over.
        """
        fault_point("publish.begin")
        folder = self.run.version_folder(step)
        unfinished = folder.with_name(f".{folder.name}.tmp")
        if self.group.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rename(self.run.spare_weights, unfinished)
            except OSError:
                unfinished.mkdir(parents=True)
        self.group.barrier()
        write_tensors(unfinished, weights(model), "model", rank=self.group.rank, barrier=self.group.barrier)
        if self.group.rank == 0:
            os.rename(unfinished, folder)
            fault_point("publish.before_announce")
            self.run.announce_version(self.attempt, step, save=save, last=last)
            fault_point("publish.announced")
