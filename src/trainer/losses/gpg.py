"""GPG: plain policy gradient."""

from typing import Any, ClassVar

import torch

from cairn.trainer.losses.policy import Objective, PolicyLoss, Terms


class Gpg(PolicyLoss):
    """-w A log p for each token (REINFORCE; GPG, arXiv:2504.02546, eq. 7).

    w, a constant, is the truncated ratio of the current weights to the sampler's, so that it is 1 for tokens
    of the current policy and old tokens don't bias the gradient.
    """

    has_ratio: ClassVar[bool] = False

    def __init__(self, **settings: Any):
        settings.setdefault("importance", "token_truncate")
        super().__init__(**settings)

    def objective(self, terms: Terms) -> Objective:
        none = torch.zeros_like(terms.logprobs, dtype=torch.bool)
        return Objective(terms.advantages * terms.logprobs, none, none)
