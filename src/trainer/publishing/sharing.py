"""Whose turn it is, where the trainer shares its GPU with servers; see `cairn.orchestrator.sharing`."""

from typing import Protocol

import torch

from cairn.config.trainer import TrainerConfig
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory


class Sharing(Protocol):
    """When the trainer may use the GPU's memory."""

    def may_train(self, step: int) -> bool:
        """Whether `step` may be trained now, if its batch is there."""
        ...

    def make_room(self) -> None:
        """Servers may be awake from now on: give back the memory that holds nothing."""
        ...


class Apart:
    """No server computes on the trainer's GPU."""

    def __init__(self, run: RunDirectory, attempt: Attempt):
        pass

    def may_train(self, step: int) -> bool:
        """At any time."""
        return True

    def make_room(self) -> None:
        """Nobody needs it: PyTorch keeps it for the next step."""


class TakingTurns:
    """Servers on the same GPU sleep while a step is trained."""

    def __init__(self, run: RunDirectory, attempt: Attempt):
        self.run = run
        self.attempt = attempt

    def may_train(self, step: int) -> bool:
        """Once the orchestrator has said that all servers sleep."""
        return self.run.versions.may_train(self.attempt, step)

    def make_room(self) -> None:
        """Free what PyTorch's allocator holds in reserve; does nothing on a CPU."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def make_sharing(config: TrainerConfig, run: RunDirectory, attempt: Attempt) -> Sharing:
    """As the configuration says."""
    return (TakingTurns if config.colocated else Apart)(run, attempt)
