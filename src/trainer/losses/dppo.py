"""DPPO: tokens are left out by how far their probability has moved, not by a ratio."""

from typing import Any, Literal

import torch

from cairn.trainer.losses.policy import Objective, PolicyLoss, Terms


class Dppo(PolicyLoss):
    """-r A for each token, without those whose probability has left a trust region (arXiv:2602.04879).

    Left out are tokens whose probability has risen (A > 0) or fallen (A <= 0) too far from what it was: by
    more than delta_high or delta_low as a difference of probabilities (`tv`), or as the KL divergence
    between the two-valued distributions of this token and all others (`kl`).
    """

    def __init__(
        self,
        divergence: Literal["tv", "kl"] = "tv",
        delta_low: float = 0.2,
        delta_high: float = 0.2,
        **settings: Any,
    ):
        super().__init__(**settings)
        self.divergence = divergence
        self.delta_low = delta_low
        self.delta_high = delta_high

    def objective(self, terms: Terms) -> Objective:
        now, before = terms.logprobs.detach().exp(), terms.reference.exp()
        distance = (now - before).abs() if self.divergence == "tv" else _binary_kl(before, now)
        is_good = terms.advantages > 0
        high = is_good & (now > before) & (distance > self.delta_high)
        low = ~is_good & (now < before) & (distance > self.delta_low)
        return Objective(torch.where(low | high, 0.0, terms.ratio * terms.advantages), low, high)


def _binary_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(p) || Bernoulli(q))."""
    least = torch.finfo(p.dtype).tiny
    return torch.xlogy(p, p / q.clamp(min=least)) + torch.xlogy(1 - p, (1 - p) / (1 - q).clamp(min=least))
