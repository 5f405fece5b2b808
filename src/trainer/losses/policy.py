"""What the losses of RL have in common: ratios, weights, aggregation, the entropy bonus and metrics.

A policy loss whose `importance` is not off compares the current weights with those at the start of the batch
(decoupled PPO, arXiv:2110.00641). What lies between these and the sampler is a constant weight of each token:
truncated importance sampling.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts

Importance = Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class TokenWeights(NamedTuple):
    """values: float32 [R, N], without gradient. bounded: bool [R, N], where a bound has changed it."""

    values: torch.Tensor
    bounded: torch.Tensor


@dataclass(frozen=True)
class Correction:
    """How the difference between two policies becomes a weight.

    kind: token_* takes the ratio of each token, sequence_* the product of its sample's ratios; *_truncate
    limits it to least..most (arXiv:1802.01561, section 4.1), *_mask makes it 0 outside of that. The kinds are
    those of TRL's vllm_importance_sampling_mode.
    geometric_least, geometric_most: samples whose geometric mean of ratios lies outside get the weight 0;
    they apply to all kinds, off included.
    """

    kind: Importance = "off"
    least: float = 0.0
    most: float = 3.0
    geometric_least: float | None = None
    geometric_most: float | None = None

    @property
    def masks_samples(self) -> bool:
        """Whether whole samples are left out by their geometric mean."""
        return self.geometric_least is not None or self.geometric_most is not None

    @property
    def does_something(self) -> bool:
        """Whether there are weights other than 1."""
        return self.kind != "off" or self.masks_samples

    @torch.no_grad()
    def weights(self, inputs: LossInputs, difference: torch.Tensor) -> TokenWeights:
        """The weight of each token.

        Args:
            difference: float32 [R, N], the logprobs of the one policy less the sampler's, 0 for tokens
                that are not learned.
        """
        found = self._of_kind(inputs, difference)
        if not self.masks_samples:
            return found
        out = self._left_out(inputs, difference)
        return TokenWeights(torch.where(out, 0.0, found.values), found.bounded | out)

    def _of_kind(self, inputs: LossInputs, difference: torch.Tensor) -> TokenWeights:
        if self.kind == "off":
            return TokenWeights(torch.ones_like(difference), torch.zeros_like(inputs.mask))
        if self.kind.startswith("sequence"):
            ratio = inputs.sum_by_sample(difference)[inputs.sample_of].exp()
        else:
            ratio = difference.exp()
        bounded = (ratio < self.least) | (ratio > self.most)
        if self.kind.endswith("mask"):
            return TokenWeights(torch.where(bounded, 0.0, ratio), bounded)
        return TokenWeights(ratio.clamp(self.least, self.most), bounded)

    def _left_out(self, inputs: LossInputs, difference: torch.Tensor) -> torch.Tensor:
        """bool [R, N]: tokens of samples whose geometric mean of ratios is out of bounds."""
        mean = (inputs.sum_by_sample(difference) / inputs.lengths.clamp(min=1)).exp()
        out = torch.zeros_like(mean, dtype=torch.bool)
        if self.geometric_least is not None:
            out |= mean < self.geometric_least
        if self.geometric_most is not None:
            out |= mean > self.geometric_most
        return out[inputs.sample_of]


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

    def _weights(self, inputs: LossInputs) -> TokenWeights | None:
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
