"""What the losses of RL have in common."""

from abc import abstractmethod

import torch

from cairn.trainer.losses.loss import Loss, LossInputs, LossSums


class PolicyLoss(Loss):
    """Policy gradient for tokens that other weights than the current ones may have sampled.

    Its ratio r is a token's probability under the current weights over that under those that sampled it, so
    mixed policy versions are accounted for token by token. Subclasses say what each token adds.
    """

    @abstractmethod
    def objective(
        self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token adds to the objective, and (bool) for which of them the ratio was bounded.

        Args:
            logprobs, ratio, advantages: float32 [R, N]; the first two with gradient.
        """

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The micro-batch's sum, and how far the policy is from the sampler's."""
        logprobs, mask = inputs.logprobs, inputs.mask
        difference = torch.where(mask, logprobs - inputs.sampler_logprobs, 0.0)
        ratio = difference.exp()
        objective, bounded = self.objective(logprobs, ratio, inputs.advantages)
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
