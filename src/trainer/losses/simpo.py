"""Simple preference optimisation."""

import torch
from torch.nn.functional import logsigmoid

from cairn.trainer.losses.preferences import Answers, PairLoss


class SimPO(PairLoss):
    """-log sigmoid(beta d - gamma), d the difference of the mean logprobs (arXiv:2405.14734, eq. 6)."""

    needs_reference = False

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0):
        self.beta = beta
        self.gamma = gamma
        self.label_smoothing = label_smoothing

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        margin = self.beta * (chosen.mean - rejected.mean) - self.gamma
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.mean
