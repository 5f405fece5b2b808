"""IcePop: importance sampling without the tokens whose ratio is out of bounds."""

from typing import Any

import torch

from cairn.trainer.losses.policy import Objective, PolicyLoss, Terms


class IcePop(PolicyLoss):
    """-sg(r) A log p for each token with ratio_min <= r <= ratio_max, 0 for others; sg stops the gradient.

    Source: IcePop (arXiv:2510.18855), where r is trainer over sampler. There a clipped ratio to the weights
    at the start of the batch stands beside it; this is `ppo_clip` with importance = "token_mask".
    """

    def __init__(self, ratio_min: float = 0.5, ratio_max: float = 2.0, **settings: Any):
        super().__init__(**settings)
        self.ratio_min = ratio_min
        self.ratio_max = ratio_max

    def objective(self, terms: Terms) -> Objective:
        weight = terms.ratio.detach()
        low, high = weight < self.ratio_min, weight > self.ratio_max
        return Objective(torch.where(low | high, 0.0, weight * terms.advantages * terms.logprobs), low, high)
