"""What the losses of preferences have in common: of pairs of answers, and of single answers with a label."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts

REFERENCE = "reference_logps"
"""The column with the logprob of a sample's learned tokens together under the reference."""
SIDE = "side"
"""The column with the kind of answer: 1 is chosen or desirable, -1 rejected or undesirable, 0 one that is not
learned from."""


@dataclass(frozen=True)
class Answers:
    """A answers: all float32 [A].

    logps: the logprob of its learned tokens together, with gradient. lengths: how many these are, at least 1.
    reference: their logprob together under the reference; zeros for a loss that needs none.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor

    @classmethod
    def of(cls, inputs: LossInputs, *, with_reference: bool) -> "Answers":
        """Each sample of a micro-batch as an answer, the padding of its rows as well."""
        logps = inputs.sum_by_sample(inputs.logprobs)
        reference = inputs.of_samples(REFERENCE) if with_reference else torch.zeros_like(logps)
        return cls(logps, inputs.lengths.clamp(min=1), reference)

    def those(self, which: torch.Tensor) -> "Answers":
        """The answers of these numbers, int64 [B]."""
        return Answers(self.logps[which], self.lengths[which], self.reference[which])

    @property
    def ratio(self) -> torch.Tensor:
        """log p / p_reference of the answer."""
        return self.logps - self.reference

    @property
    def mean(self) -> torch.Tensor:
        """The mean logprob of a token."""
        return self.logps / self.lengths


class PairLoss(Loss):
    """A loss of the two answers of each pair; each pair counts the same.

    Pairs of which an answer has no learned token, because nothing of it is left after cutting, count nothing.
    """

    form = "pairs"
    needs_reference = True

    @abstractmethod
    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        """The loss of each pair, [P]."""

    def shown(self, chosen: Answers, rejected: Answers) -> Mapping[str, torch.Tensor]:
        """Further metrics of each pair, by name: [P]."""
        return {"logps/chosen": chosen.logps, "logps/rejected": rejected.logps}

    @abstractmethod
    def reward(self, answers: Answers) -> torch.Tensor:
        """The reward that the loss implies, for metrics: [P]."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The micro-batch's sum, and how far the chosen answers are ahead."""
        units = inputs.micro.units
        answers = Answers.of(inputs, with_reference=self.needs_reference)
        counts = inputs.of_samples(SIDE)[units[:, 0]] > 0
        chosen, rejected = answers.those(units[:, 0]), answers.those(units[:, 1])
        losses = torch.where(counts, self.of_pairs(chosen, rejected), 0.0)
        with torch.no_grad():
            rewards = self.reward(chosen), self.reward(rejected)
            shown = {
                "rewards/chosen": rewards[0],
                "rewards/rejected": rewards[1],
                "rewards/margins": rewards[0] - rewards[1],
                "rewards/accuracies": (rewards[0] > rewards[1]).float(),
                **self.shown(chosen, rejected),
            }
            pairs = counts.sum()
            averages = {
                name: (torch.where(counts, values, 0.0).sum(), pairs) for name, values in shown.items()
            }
        # Without a pair, as in a micro-batch that only fills up the number, all parameters still get a
        # gradient, of zero.
        return LossSums(losses.sum() + 0.0 * answers.logps.sum(), averages=averages)

    def normaliser(self, counts: BatchCounts) -> float:
        """The number of pairs that are learned from: of others, both answers are unlearned."""
        return max(counts.records - counts.unlearned // 2, 1)


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
