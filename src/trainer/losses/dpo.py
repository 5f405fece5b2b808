"""Direct preference optimisation."""

import torch
from torch.nn.functional import logsigmoid

from cairn.trainer.losses.preferences import Answers, PairLoss


class DPO(PairLoss):
    """-log sigmoid(beta d), d the difference of the answers' log-ratios (arXiv:2305.18290, eq. 7).

    With label smoothing e: -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), conservative DPO.
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0):
        self.beta = beta
        self.label_smoothing = label_smoothing

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        margin = self.beta * (chosen.ratio - rejected.ratio)
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.ratio
