"""PPO's loss."""

from typing import Any

import torch

from cairn.trainer.losses.policy import Objective, PolicyLoss, Terms


class PPOClip(PolicyLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token (PPO, arXiv:1707.06347, eq. 7).

    A token whose ratio has left the bounds in the direction of its advantage has no gradient. A larger
    clip_high than clip_low is DAPO's clip-higher (arXiv:2503.14476, section 3.1). With `dual_clip` a token of
    negative advantage adds at most -dual_clip A, so that a huge ratio has no gradient (arXiv:1912.09729).
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, **settings: Any
    ):
        super().__init__(**settings)
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def objective(self, terms: Terms) -> Objective:
        ratio, advantages = terms.ratio, terms.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        values = torch.minimum(ratio * advantages, clipped * advantages)
        bounded = ratio * advantages > clipped * advantages
        low, high = bounded & (advantages < 0), bounded & (advantages > 0)
        if self.dual_clip is not None:
            least = torch.where(advantages < 0, self.dual_clip * advantages, -torch.inf)
            high = high | (values < least)
            values = torch.maximum(values, least)
        return Objective(values, low, high)
