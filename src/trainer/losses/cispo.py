"""CISPO: policy gradient with truncated importance sampling of each token."""

from typing import Any

import torch

from cairn.trainer.losses.policy import Objective, PolicyLoss, Terms


class Cispo(PolicyLoss):
    """-sg(min(r, ratio_max)) A log p for each token (arXiv:2506.13585, eq. 4 and 5); sg stops the gradient.

    Unlike with clipping, tokens whose ratio is out of bounds keep their gradient. The paper's bound is
    1 + epsilon_high, with no lower bound; TRL's epsilon_high is ratio_max itself.
    """

    def __init__(self, ratio_max: float = 2.0, **settings: Any):
        super().__init__(**settings)
        self.ratio_max = ratio_max

    def objective(self, terms: Terms) -> Objective:
        weight = terms.ratio.detach()
        values = weight.clamp(max=self.ratio_max) * terms.advantages * terms.logprobs
        return Objective(values, torch.zeros_like(weight, dtype=torch.bool), weight > self.ratio_max)
