"""Truncated importance sampling."""

import torch

from cairn.trainer.losses.policy import PolicyLoss


class Truncate(PolicyLoss):
    """-sg(min(r, ratio_max)) A log p for each token (arXiv:1802.01561, section 4.1); sg stops the gradient.

    Unlike with clipping, tokens whose ratio is out of bounds keep their gradient.
    """

    def __init__(self, ratio_max: float = 2.0):
        self.ratio_max = ratio_max

    def objective(
        self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PolicyLoss.objective`."""
        weight = ratio.detach()
        return weight.clamp(max=self.ratio_max) * advantages * logprobs, weight > self.ratio_max
