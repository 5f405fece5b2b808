"""Weights for tokens that other arithmetic or older weights have sampled: truncated importance sampling.

A policy loss whose `importance` is not off compares the current weights with those at the start of the batch
(decoupled PPO, arXiv:2110.00641). What lies between these and the sampler is a constant weight of each token.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from cairn.trainer.losses.loss import LossInputs

Importance = Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Weights(NamedTuple):
    """values: float32 [R, N], without gradient. bounded: bool [R, N], where a bound has changed it."""

    values: torch.Tensor
    bounded: torch.Tensor


@dataclass(frozen=True)
class Correction:
    """How the difference between two policies becomes a weight.

    kind: token_* takes the ratio of each token, sequence_* the product of those of its sample; *_truncate
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
    def weights(self, inputs: LossInputs, difference: torch.Tensor) -> Weights:
        """The weight of each token.

        Args:
            difference: float32 [R, N], the logprobs of the one policy less those of the sampler, 0 for tokens
                that are not learned.
        """
        found = self._of_kind(inputs, difference)
        if not self.masks_samples:
            return found
        out = self._left_out(inputs, difference)
        return Weights(torch.where(out, 0.0, found.values), found.bounded | out)

    def _of_kind(self, inputs: LossInputs, difference: torch.Tensor) -> Weights:
        if self.kind == "off":
            return Weights(torch.ones_like(difference), torch.zeros_like(inputs.mask))
        if self.kind.startswith("sequence"):
            ratio = inputs.sum_by_sample(difference)[inputs.sample_of].exp()
        else:
            ratio = difference.exp()
        bounded = (ratio < self.least) | (ratio > self.most)
        if self.kind.endswith("mask"):
            return Weights(torch.where(bounded, 0.0, ratio), bounded)
        return Weights(ratio.clamp(self.least, self.most), bounded)

    def _left_out(self, inputs: LossInputs, difference: torch.Tensor) -> torch.Tensor:
        """bool [R, N]: tokens of samples whose geometric mean of ratios is out of bounds."""
        mean = (inputs.sum_by_sample(difference) / inputs.lengths.clamp(min=1)).exp()
        out = torch.zeros_like(mean, dtype=torch.bool)
        if self.geometric_least is not None:
            out |= mean < self.geometric_least
        if self.geometric_most is not None:
            out |= mean > self.geometric_most
        return out[inputs.sample_of]
