"""What a step trains: a model, and the loss that is computed from its outputs."""

from abc import ABC, abstractmethod

import torch

from cairn.config.optimizer import BaseOptimizerConfig, SchedulerConfig
from cairn.trainer.losses import Loss, LossInputs, LossSums
from cairn.trainer.models.trained import Trained
from cairn.trainer.packing import BatchCounts, MicroBatch
from cairn.trainer.state import TrainerState


class Learner(ABC):
    """A model that learns from each batch; a step trains all learners on the same micro-batches.

    name: what its metrics begin with, with a slash, and errors call it; "" for the policy. loss_name: what
    errors call its loss.
    """

    name: str
    loss_name: str
    model: Trained
    optimizer: BaseOptimizerConfig | None = None
    """Settings of its optimiser; None: the policy's."""
    scheduler: SchedulerConfig | None = None
    """Its learning rate schedule; None: the policy's."""

    @abstractmethod
    def normaliser(self, counts: BatchCounts) -> float:
        """What the sum over an update's micro-batches is divided by, above 0; `counts` is of all ranks."""

    @abstractmethod
    def sums(self, micro: MicroBatch, temperature: float) -> LossSums:
        """The forward pass of one micro-batch, which is on the model's device.

        Args:
            temperature: of the sampler.
        """

    def added_to(
        self, loss: torch.Tensor, sums: LossSums, micro: MicroBatch, counts: BatchCounts, ranks: int
    ) -> torch.Tensor:
        """The micro-batch's loss with what the model itself adds to it, such as balance between experts.

        Args:
            loss: divided by the normaliser, and scaled for FSDP2's mean over `ranks`.
        """
        return loss


class PolicyLearner(Learner):
    """The policy, with the loss that the configuration chooses."""

    name = ""

    def __init__(self, state: TrainerState, loss: Loss):
        """Train `state`'s policy."""
        self.model = state.policy
        self.loss_name = type(loss).__name__
        self._state = state
        self._loss = loss

    def normaliser(self, counts: BatchCounts) -> float:
        return self._loss.normaliser(counts)

    def sums(self, micro: MicroBatch, temperature: float) -> LossSums:
        """Logprobs of the learned tokens, and the loss of them."""
        with self._state.balance.watching():
            logprobs, entropies = self._state.scorer.scores(
                micro, temperature, entropies=self._loss.needs_entropies
            )
        return self._loss(LossInputs.of(logprobs, micro, entropies))

    def added_to(
        self, loss: torch.Tensor, sums: LossSums, micro: MicroBatch, counts: BatchCounts, ranks: int
    ) -> torch.Tensor:
        """With the balance of the experts."""
        return self._state.balance.added_to(loss, sums, micro, counts, ranks)
