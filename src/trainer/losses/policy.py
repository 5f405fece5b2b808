"""What the losses of RL have in common: ratios, weights, aggregation, the entropy bonus and metrics."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from cairn.trainer.losses.importance import Correction, Importance, Weights
from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Terms:
    """What an objective is computed from, float32 [R, N] each.

    logprobs, with gradient; reference: those that the ratio is relative to; ratio: of probabilities, with
    gradient; advantages. Tokens that are not learned have the ratio 1.
    """

    logprobs: torch.Tensor
    reference: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor


class Objective(NamedTuple):
    """values: float32 [R, N], what each token adds to the objective, with gradient. low, high: bool [R, N],
    for which tokens the ratio was bounded because it is small, or large."""

    values: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


class PolicyLoss(Loss):
    """Policy gradient for tokens that other weights than the current ones may have sampled.

    Its ratio r is a token's probability under the current weights over that under those that sampled it, so
    mixed policy versions are accounted for token by token. Subclasses say what each token adds.

    With `importance`, r is relative to the weights at the start of the batch, and `Correction` accounts for
    the rest.
    """

    takes_kl = True
    has_ratio: ClassVar[bool] = True
    """Whether the objective depends on r; without, weights compare the current policy with the sampler."""

    def __init__(
        self,
        aggregation: Aggregation = "token",
        aggregation_tokens: int | None = None,
        entropy_coef: float | None = None,
        importance: Importance = "off",
        importance_min: float = 0.0,
        importance_max: float = 3.0,
        geometric_min: float | None = None,
        geometric_max: float | None = None,
    ):
        """Take the settings that all of these losses have; `cairn.config.loss` describes and checks them."""
        self.aggregation = aggregation
        self.aggregation_tokens = aggregation_tokens
        self.entropy_coef = entropy_coef
        self.needs_entropies = entropy_coef is not None
        self.correction = Correction(importance, importance_min, importance_max, geometric_min, geometric_max)
        self.is_decoupled = importance != "off" and self.has_ratio
        self.needs_old = self.has_ratio and (self.is_decoupled or self.correction.masks_samples)

    @abstractmethod
    def objective(self, terms: Terms) -> Objective:
        """What each token adds to the objective."""

    def ratio(self, inputs: LossInputs, of_tokens: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor:
        """r of each token, from the ratios of single tokens and their logarithms; all float32 [R, N]."""
        return of_tokens

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The micro-batch's sum, and how far the policy is from the sampler's."""
        logprobs, mask, sampler = inputs.logprobs, inputs.mask, inputs.sampler_logprobs
        reference = inputs.old_logprobs if self.is_decoupled else sampler
        difference = torch.where(mask, logprobs - reference, 0.0)
        of_tokens = difference.exp()
        ratio = self.ratio(inputs, of_tokens, difference)
        values, low, high = self.objective(Terms(logprobs, reference, ratio, inputs.advantages))
        means: dict[str, torch.Tensor] = {}
        if (weights := self._weights(inputs)) is not None:
            values = values * weights.values
            means["importance/mean"] = (weights.values * mask).sum()
            means["importance/bounded"] = (weights.bounded & mask).sum()
        if self.entropy_coef is not None:
            means["entropy"] = (inputs.entropies.detach() * mask).sum()
            if self.entropy_coef:
                values = values + self.entropy_coef * inputs.entropies
        if self.kl is not None:
            values = values - self.kl(inputs, means)
        if self.aggregation == "sequence":
            values = values / inputs.lengths.clamp(min=1)[inputs.sample_of]
        with torch.no_grad():
            if self.is_decoupled:
                difference = torch.where(mask, logprobs - sampler, 0.0)
                of_tokens = difference.exp()
            gap = difference.abs()
            means |= {
                "ratio/mean": (ratio * mask).sum(),
                "ratio/clipped": ((low | high) & mask).sum(),
                "ratio/clipped_low": (low & mask).sum(),
                "ratio/clipped_high": (high & mask).sum(),
                "mismatch/logprob": gap.sum(),
                # k3 estimator of KL(sampler || trainer), http://joschu.net/blog/kl-approx.html
                "mismatch/kl": ((of_tokens - 1 - difference) * mask).sum(),
            }
            maxima = {"ratio/max": (ratio * mask).max(), "mismatch/logprob_max": gap.max()}
        return LossSums(-(values * mask).sum(), means, maxima)

    def _weights(self, inputs: LossInputs) -> Weights | None:
        """The weights of what lies between the sampler and the policy that r is relative to."""
        if not self.correction.does_something:
            return None
        now = inputs.old_logprobs if self.needs_old else inputs.logprobs.detach()
        return self.correction.weights(inputs, torch.where(inputs.mask, now - inputs.sampler_logprobs, 0.0))

    def normaliser(self, counts: BatchCounts) -> float:
        """The number of learned tokens, of samples with any, or of all samples times a constant."""
        if self.aggregation == "token":
            return super().normaliser(counts)
        if self.aggregation == "sequence":
            return max(counts.samples - counts.unlearned, 1)
        assert self.aggregation_tokens is not None, "the configuration has checked it"
        return max(counts.samples, 1) * self.aggregation_tokens
