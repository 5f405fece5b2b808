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
    """Policy gradient for tokens that other weights than the current ones have sampled.

    r is a token's probability under the current weights over that under those that sampled it, so mixed
    policy versions are accounted for token by token. With an advantage A, each token adds

    - clip: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7),
    - truncate: -sg(min(r, ratio_max)) A log p (truncated importance sampling, arXiv:1802.01561, section 4.1),
    - mask: -sg(r) A log p where ratio_min <= r <= ratio_max, else nothing,

    sg being a stopped gradient. truncate and mask keep the gradient of tokens whose ratio has left the bounds
    for the better, which clip does not.
    """

    def __init__(self, config: PolicyLossConfig):
        self.config = config

    def __call__(self, logprobs: torch.Tensor, micro: MicroBatch) -> LossSums:
        """As `sft_loss`."""
        mask = micro.loss_mask[:, 1:]
        advantages = micro.columns["advantages"][:, 1:]
        difference = torch.where(mask, logprobs - micro.columns["logprobs"][:, 1:], 0.0)
        ratio = difference.exp()
        objective, bounded = self._objective(logprobs, ratio, advantages)
        with torch.no_grad():
            gap = difference.abs()
            means = {
                "ratio/mean": (ratio * mask).sum(),
                "ratio/clipped": (bounded & mask).sum(),
                "mismatch/logprob": gap.sum(),
                # k3 estimator of KL(sampler || trainer), http://joschu.net/blog/kl-approx.html
                "mismatch/kl": ((ratio - 1 - difference) * mask).sum(),
            }
            maxima = {"ratio/max": (ratio * mask).max(), "mismatch/logprob_max": gap.max()}
        return LossSums(-(objective * mask).sum(), means, maxima)

    def _objective(
        self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token adds, and (bool) for which of them the ratio was bounded."""
        config = self.config
        if config.correction == "clip":
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            objective = torch.minimum(ratio * advantages, clipped * advantages)
            return objective, ratio * advantages > clipped * advantages
        weight = ratio.detach()
        if config.correction == "truncate":
            return weight.clamp(max=config.ratio_max) * advantages * logprobs, weight > config.ratio_max
        outside = (weight < config.ratio_min) | (weight > config.ratio_max)
        return torch.where(outside, 0.0, weight * advantages * logprobs), outside
