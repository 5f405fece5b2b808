"""Kahneman-Tversky optimisation."""

import torch

from cairn.trainer.losses.preferences import Answers, ExampleLoss


class KTO(ExampleLoss):
    """w (1 - sigmoid(beta s)), where s is r - z of a desirable answer, and z - r of an undesirable one.

    r is the answer's log-ratio, z the reference point, and w the weight of answers of its kind
    (arXiv:2402.01306, eqs. 7 and 8).
    """

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0):
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def of_examples(self, answers: Answers, desirable: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        above = answers.ratio - point
        better = torch.where(desirable, above, -above)
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        return weights * torch.sigmoid(-self.beta * better)

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.ratio
