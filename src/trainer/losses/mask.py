"""Importance sampling without the tokens whose ratio is out of bounds."""

import torch

from cairn.trainer.losses.policy import PolicyLoss


class Mask(PolicyLoss):
    """-sg(r) A log p for each token with ratio_min <= r <= ratio_max, 0 for others; sg stops the gradient."""

    def __init__(self, ratio_min: float = 0.5, ratio_max: float = 2.0):
        self.ratio_min = ratio_min
        self.ratio_max = ratio_max

    def objective(
        self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PolicyLoss.objective`."""
        weight = ratio.detach()
        outside = (weight < self.ratio_min) | (weight > self.ratio_max)
        return torch.where(outside, 0.0, weight * advantages * logprobs), outside
