"""Answers of a micro-batch, as losses of preferences see them."""

from dataclasses import dataclass

import torch

from cairn.trainer.losses.loss import LossInputs

REFERENCE = "reference_logps"
"""The column with the logprob of a sample's learned tokens together under the reference."""
SIDE = "side"
"""The column with the kind of answer: 1 is chosen or desirable, -1 rejected or undesirable, 0 one that is not
learned from."""


@dataclass(frozen=True)
class Answers:
    """A answers: all float32 [A].

    logps: the logprob of its learned tokens together, with gradient. lengths: how many these are, at least 1.
    reference: their logprob together under the reference; zeros for a loss that needs none.
    """

    logps: torch.Tensor
    lengths: torch.Tensor
    reference: torch.Tensor

    @classmethod
    def of(cls, inputs: LossInputs, *, with_reference: bool) -> "Answers":
        """Each sample of a micro-batch as an answer, the padding of its rows as well."""
        logps = inputs.sum_by_sample(inputs.logprobs)
        reference = inputs.of_samples(REFERENCE) if with_reference else torch.zeros_like(logps)
        return cls(logps, inputs.lengths.clamp(min=1), reference)

    def those(self, which: torch.Tensor) -> "Answers":
        """The answers of these numbers, int64 [B]."""
        return Answers(self.logps[which], self.lengths[which], self.reference[which])

    @property
    def ratio(self) -> torch.Tensor:
        """log p / p_reference of the answer."""
        return self.logps - self.reference

    @property
    def mean(self) -> torch.Tensor:
        """The mean logprob of a token."""
        return self.logps / self.lengths
