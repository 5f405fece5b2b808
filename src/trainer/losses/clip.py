"""PPO's loss."""

import torch

from cairn.trainer.losses.policy import PolicyLoss


class Clip(PolicyLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token (PPO, arXiv:1707.06347, eq. 7).

    A token whose ratio has left the bounds in the direction of its advantage has no gradient.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2):
        self.clip_low = clip_low
        self.clip_high = clip_high

    def objective(
        self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PolicyLoss.objective`."""
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        return objective, ratio * advantages > clipped * advantages
