"""The loss of reward models."""

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from cairn.trainer.losses.preferences import Answers, PairLoss


class BradleyTerry(PairLoss):
    """-log sigmoid(r_chosen - r_rejected) + center (r_chosen + r_rejected)^2, r the model's rewards.

    The first term is the likelihood of the Bradley-Terry model (arXiv:2203.02155, eq. 1); the second keeps
    rewards around 0, which the first does not determine (arXiv:2312.09244).
    """

    needs_reference = False

    def __init__(self, center: float = 0.0):
        self.center = center

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        one, other = self.reward(chosen), self.reward(rejected)
        return self.center * (one + other) ** 2 - logsigmoid(one - other)

    def reward(self, answers: Answers) -> torch.Tensor:
        """What the model gives the one token that stands for the answer."""
        return answers.logps

    def shown(self, chosen: Answers, rejected: Answers) -> Mapping[str, torch.Tensor]:
        return {}
