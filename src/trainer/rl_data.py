"""The trainer's side of RL: batches from the orchestrator, policy versions to it."""

import os
import shutil

from transformers import PreTrainedModel

from cairn.checkpoint.tensors import write_tensors
from cairn.config.trainer import TrainerConfig
from cairn.run.batches import Batch, batch_path
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.waiting import wait_for
from cairn.trainer.group import Group
from cairn.trainer.model import weights


class RLData:
    """Reads the orchestrator's batch files in order of steps."""

    def __init__(self, config: TrainerConfig, run: RunDirectory, attempt: Attempt, position: int):
        self.config = config
        self.run = run
        self.attempt = attempt
        self.position = position

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
        self.position += len(batch.samples)
        return batch


class VersionPublisher:
    """Puts each policy version where the orchestrator finds it."""

    def __init__(self, run: RunDirectory, attempt: Attempt, group: Group):
        self.run = run
        self.attempt = attempt
        self.group = group

    def is_replay(self, step: int) -> bool:
        """Whether the orchestrator has had the policy of `step` already: it has shipped the next batch.

        So it is when a trainer that died is started again and goes through the same batches.
        """
        return batch_path(self.run.batches, step + 1).exists()

    def publish(self, step: int, model: PreTrainedModel, *, save: bool, last: bool) -> None:
        """Write the weights after `step` optimiser steps, then announce them; all ranks call it.

        A version is written once, under a path of its own, and never changed: servers map the file.
        """
        folder = self.run.version_folder(step)
        unfinished = folder.with_name(f".{folder.name}.tmp")
        if self.group.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.mkdir(parents=True)
        self.group.barrier()
        write_tensors(unfinished, weights(model), "model", rank=self.group.rank, barrier=self.group.barrier)
        if self.group.rank == 0:
            os.rename(unfinished, folder)
            self.run.announce_version(self.attempt, step, save=save, last=last)
            # A batch for this step came, so the servers have long left the version before the last.
            self._forget(step - 2)

    def _forget(self, step: int) -> None:
        folder = self.run.version_folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".json").unlink(missing_ok=True)
