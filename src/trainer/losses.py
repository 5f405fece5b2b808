"""What SFT and RL minimise, as sums over tokens; the loop divides by the step's global token count."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cairn.config.trainer import PolicyLossConfig
from cairn.trainer.packing import MicroBatch


@dataclass
class LossSums:
    """Sums over a micro-batch's learned tokens; `maxima` holds largest values instead.

    loss: scalar, with gradient. The others are for metrics.jsonl, without gradient.
    """

    loss: torch.Tensor
    means: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


LossFunction = Callable[[torch.Tensor, MicroBatch], LossSums]


def sft_loss(logprobs: torch.Tensor, micro: MicroBatch) -> LossSums:
    """Negative log-likelihood of the learned tokens.

    Args:
        logprobs: float32 [R, T - 1], of tokens 1 to T - 1 under the current weights.
        micro: the micro-batch they belong to.
    """
    mask = micro.loss_mask[:, 1:]
    return LossSums(-(logprobs * mask).sum(), {}, {})


class PolicyLoss:
    """Clipped policy gradient: -min(r A, clip(r) A) with a ratio r for each token (arXiv:1707.06347, eq. 7).

    r is the probability under the current weights over that under the weights that sampled the token.
    """

    def __init__(self, config: PolicyLossConfig):
        self.config = config

    def __call__(self, logprobs: torch.Tensor, micro: MicroBatch) -> LossSums:
        """As `sft_loss`."""
        mask = micro.loss_mask[:, 1:]
        advantages = micro.advantages[:, 1:]
        difference = torch.where(mask, logprobs - micro.logprobs[:, 1:], 0.0)
        ratio = difference.exp()
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        with torch.no_grad():
            gap = difference.abs()
            means = {
                "ratio/mean": (ratio * mask).sum(),
                "ratio/clipped": ((ratio * advantages > clipped * advantages) & mask).sum(),
                "mismatch/logprob": gap.sum(),
                # k3 estimator of KL(sampler || trainer), http://joschu.net/blog/kl-approx.html
                "mismatch/kl": ((ratio - 1 - difference) * mask).sum(),
            }
            maxima = {"ratio/max": (ratio * mask).max(), "mismatch/logprob_max": gap.max()}
        return LossSums(-(objective * mask).sum(), means, maxima)
