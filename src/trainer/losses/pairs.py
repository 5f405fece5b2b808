"""What the losses of pairs of answers have in common."""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from cairn.trainer.losses.answers import SIDE, Answers
from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts


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
