"""What the losses of single answers, each desirable or undesirable, have in common."""

from abc import abstractmethod

import torch

from cairn.trainer.losses.answers import SIDE, Answers
from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts

POINT = "reference_point"
"""The column with what log-ratios are compared with: one number for the whole step, at least 0."""


class ExampleLoss(Loss):
    """A loss of answers that are desirable or undesirable; each counts the same.

    Answers without a learned token, because nothing of them is left after cutting, count nothing.
    """

    form = "examples"
    needs_reference = True

    @abstractmethod
    def of_examples(self, answers: Answers, desirable: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """The loss of each of A answers, [A].

        Args:
            desirable: bool [A]; other answers are undesirable.
            point: float32 [A], the mean of log p / p_reference over the step's answers to other prompts than
                their own, but at least 0: an estimate of how far the model is from the reference, without
                gradient. Equal for all; 0 for a loss that needs no reference.
        """

    @abstractmethod
    def reward(self, answers: Answers) -> torch.Tensor:
        """The reward that the loss implies, for metrics: [A]."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The micro-batch's sum, and the rewards of desirable and undesirable answers."""
        which = inputs.micro.units[:, 0]
        answers = Answers.of(inputs, with_reference=self.needs_reference).those(which)
        side = inputs.of_samples(SIDE)[which]
        point = inputs.of_samples(POINT)[which] if self.needs_reference else torch.zeros_like(answers.logps)
        desirable, undesirable = side > 0, side < 0
        losses = torch.where(side != 0, self.of_examples(answers, desirable, point), 0.0)
        averages = {"kl": (point.sum(), torch.ones_like(point).sum())}
        with torch.no_grad():
            shown = {"rewards": self.reward(answers), "logps": answers.logps}
            for kind, those in (("chosen", desirable), ("rejected", undesirable)):
                for name, values in shown.items():
                    averages[f"{name}/{kind}"] = torch.where(those, values, 0.0).sum(), those.sum()
        # Also without an answer, all parameters get a gradient.
        return LossSums(losses.sum() + 0.0 * inputs.logprobs.sum(), averages=averages)

    def normaliser(self, counts: BatchCounts) -> float:
        """The number of answers that are learned from."""
        return max(counts.records - counts.unlearned, 1)
