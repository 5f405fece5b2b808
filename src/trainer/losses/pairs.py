"""What the losses of pairs of answers have in common."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts

REFERENCE = "reference_logps"
"""The column with the logprob of a sample's learned tokens together under the reference."""
SIDE = "side"
"""The column with the kind of answer: 1 is chosen, -1 rejected, 0 one that is not learned from."""


@dataclass(frozen=True)
class Answers:
    """One answer of each of P pairs: all float32 [P].

    logps: the logprob of its learned tokens together, with gradient. lengths: how many these are, at least 1.
    reference: their logprob together under the reference; zeros for a loss that needs none.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor

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
        logps = inputs.sum_by_sample(inputs.logprobs)
        lengths = inputs.lengths.clamp(min=1)
        reference = inputs.of_samples(REFERENCE) if self.needs_reference else torch.zeros_like(logps)
        counts = inputs.of_samples(SIDE)[units[:, 0]] > 0
        chosen, rejected = (
            Answers(logps[which], lengths[which], reference[which]) for which in (units[:, 0], units[:, 1])
        )
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
        return LossSums(losses.sum() + 0.0 * logps.sum(), averages=averages)

    def normaliser(self, counts: BatchCounts) -> float:
        """The number of pairs that are learned from: of others, both answers are unlearned."""
        return max(counts.records - counts.unlearned // 2, 1)
