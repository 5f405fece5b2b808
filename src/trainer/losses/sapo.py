"""SAPO: a soft gate in the place of clipping."""

from typing import Any

import torch

from cairn.trainer.losses.policy import Objective, PolicyLoss, Terms


class Sapo(PolicyLoss):
    """-(4 / tau) sigmoid(tau (r - 1)) A for each token (arXiv:2511.20347).

    tau is tau_pos for A > 0 and tau_neg otherwise. The gradient is weighted with r times a factor that is 1
    at r = 1 and falls smoothly on both sides.
    """

    def __init__(self, tau_pos: float = 1.0, tau_neg: float = 1.05, **settings: Any):
        settings.setdefault("aggregation", "sequence")
        super().__init__(**settings)
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def objective(self, terms: Terms) -> Objective:
        tau = torch.where(terms.advantages > 0, self.tau_pos, self.tau_neg)
        values = torch.sigmoid(tau * (terms.ratio - 1)) * (4 / tau) * terms.advantages
        none = torch.zeros_like(values, dtype=torch.bool)
        return Objective(values, none, none)
