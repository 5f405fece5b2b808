"""Odds ratio preference optimisation."""

import torch
from torch.nn.functional import logsigmoid

from cairn.trainer.losses.preferences import Answers, PairLoss

CERTAIN = -1e-6
"""Mean logprobs above this count as this: odds are infinite at 0."""


class ORPO(PairLoss):
    """Mean -log p of the chosen answer's tokens, less beta log sigmoid of the log odds ratio of the answers.

    p of an answer is the geometric mean of its tokens' probabilities, and its odds are p / (1 - p)
    (arXiv:2403.07691, eqs. 6 and 7; beta is their lambda).
    """

    needs_reference = False

    def __init__(self, beta: float = 0.1):
        self.beta = beta

    def of_pairs(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        return -chosen.mean - self.beta * logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))

    def reward(self, answers: Answers) -> torch.Tensor:
        return self.beta * answers.mean


def _log_odds(logps: torch.Tensor) -> torch.Tensor:
    """log p / (1 - p), from log p."""
    logps = logps.clamp(max=CERTAIN)
    return logps - torch.log(-torch.expm1(logps))
