"""GSPO: one ratio for a whole answer."""

from typing import Any

import torch

from cairn.trainer.losses.loss import LossInputs
from cairn.trainer.losses.ppo_clip import PPOClip


class Gspo(PPOClip):
    """PPO's objective with one ratio for a sample: the geometric mean of its tokens' (arXiv:2507.18071).

    Its gradient reaches each token's logprob by itself (GSPO-token, eq. 13 and 14), which is the same where
    all tokens of a sample have one advantage.
    """

    def __init__(
        self,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        dual_clip: float | None = None,
        **settings: Any,
    ):
        settings.setdefault("aggregation", "sequence")
        super().__init__(clip_low, clip_high, dual_clip, **settings)

    def ratio(self, inputs: LossInputs, of_tokens: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor:
        constant = logarithms.detach()
        mean = inputs.sum_by_sample(constant) / inputs.lengths.clamp(min=1)
        ratio = (mean[inputs.sample_of] + (logarithms - constant)).exp()
        return torch.where(inputs.mask, ratio, 1.0)
