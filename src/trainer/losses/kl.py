"""Estimates of the KL divergence from a reference, for each token that the policy has sampled.

With d = log(policy / reference) of a sampled token (http://joschu.net/blog/kl-approx.html): k1 = d,
k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The means of k1 and k3 over the policy's samples are KL(policy ||
reference), k3's with less variance and never below 0; k2's is near it where the two are close.

Their gradients mean something else (arXiv:2510.01555): for samples of the current policy, that of k1 is 0
on average, that of k2 is the gradient of KL(policy || reference), and that of k3 the gradient of
KL(reference || policy), to which the former is equal only to first order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from cairn.config.teachers import REFERENCE_LOGPROBS
from cairn.trainer.losses.loss import LossInputs

Estimator = Literal["k1", "k2", "k3"]

ESTIMATORS: dict[Estimator, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}
"""From log(policy / reference) of sampled tokens, float32 of any shape."""


@dataclass(frozen=True)
class KLPenalty:
    """A term of a policy's loss that grows with its distance from the reference.

    unbiased: multiply each token's estimate by its probability under the current weights over that under the
    weights that sampled it, through which the gradient flows as well. The gradient of k1 and k3 then is that
    of KL(policy || reference), whatever weights the samples come from (arXiv:2512.02556, section 3.1).
    """

    coef: float
    estimator: Estimator = "k3"
    unbiased: bool = False

    def __call__(self, inputs: LossInputs, means: dict[str, torch.Tensor]) -> torch.Tensor:
        """What each token adds to the loss, float32 [R, N], with gradient, and 0 where nothing is learned.

        Adds the metric `kl/reference`, the estimate without `coef` and ratio, to `means`.
        """
        mask, reference = inputs.mask, inputs.column(REFERENCE_LOGPROBS)
        estimate = ESTIMATORS[self.estimator](torch.where(mask, inputs.logprobs - reference, 0.0))
        means["kl/reference"] = estimate.detach().sum()
        if self.unbiased:
            estimate = estimate * torch.where(mask, inputs.logprobs - inputs.sampler_logprobs, 0.0).exp()
        return self.coef * estimate
