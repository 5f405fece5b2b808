"""Identity preference optimisation."""

import torch

from cairn.trainer.losses.preferences import Answers, PairLoss


class IPO(PairLoss):
    """(h - 1 / (2 beta))^2, h the difference of the answers' log-ratios (arXiv:2310.12036, eq. 17).

    Log-ratios are means over an answer's tokens, as in TRL, so that beta does not depend on lengths.
    """

    def __init__(self, beta: float = 0.1):
        self.beta = beta

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        difference = chosen.ratio / chosen.lengths - rejected.ratio / rejected.lengths
        return (difference - 1 / (2 * self.beta)) ** 2

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.ratio
