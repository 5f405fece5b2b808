"""What a loss is given, and what it returns."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from cairn.run.errors import UsageError
from cairn.trainer.packing import BatchCounts, MicroBatch

if TYPE_CHECKING:
    from cairn.trainer.losses.kl import KLPenalty

OLD_LOGPROBS = "old_logprobs"
"""The column with the logprobs under the weights at the begin of the step."""


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch as a loss sees it: R rows of N tokens, without the first token of each row.

    Several samples may share a row. A token that is not learned, such as one of a prompt or of padding, is
    False in `mask`, and the loss must not depend on its values.

    logprobs: float32 [R, N], of each token under the weights that are trained, with gradient.
    mask: bool [R, N], which tokens are learned.
    columns: what else the batch says of each token, by name, [R, N]; see `cairn.run.batches.COLUMNS`.
    all_entropies: `entropies`, or None for a loss that does not need them.
    """

    logprobs: torch.Tensor
    mask: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    micro: MicroBatch = field(repr=False)
    all_entropies: torch.Tensor | None = None

    @classmethod
    def of(
        cls, logprobs: torch.Tensor, micro: MicroBatch, entropies: torch.Tensor | None = None
    ) -> "LossInputs":
        """Of logprobs of tokens 1 to T - 1 (float32 [R, T - 1]) and the micro-batch of T tokens a row.

        Args:
            entropies: of the distributions that these tokens are drawn from, like logprobs.
        """
        columns = {name: values[:, 1:] for name, values in micro.columns.items()}
        return cls(logprobs, micro.loss_mask[:, 1:], columns, micro, entropies)

    def column(self, name: str) -> torch.Tensor:
        """A column of the batch, [R, N].

        Raises:
            UsageError: the batch has no such column.
        """
        if name not in self.columns:
            there = ", ".join(self.columns) or "none"
            raise UsageError(f"the loss needs the column {name!r}, and this run's batches have {there}")
        return self.columns[name]

    @property
    def sampler_logprobs(self) -> torch.Tensor:
        """Logprobs of the tokens under the policies that sampled them, float32 [R, N]."""
        return self.column("logprobs")

    @property
    def advantages(self) -> torch.Tensor:
        """Advantages of the tokens, float32 [R, N]."""
        return self.column("advantages")

    @property
    def old_logprobs(self) -> torch.Tensor:
        """Logprobs of the tokens under the weights at the begin of the step, float32 [R, N], no gradient.

        They differ from `logprobs` only where a step updates the weights more than once; a loss that asks for
        them says so with `Loss.needs_old`.
        """
        return self.columns.get(OLD_LOGPROBS, self.logprobs.detach())

    @property
    def entropies(self) -> torch.Tensor:
        """Entropy in nats of the distribution that each token is drawn from, float32 [R, N], with gradient;
        0 for tokens that are not learned.

        Raises:
            UsageError: the loss does not say that it needs them.
        """
        if self.all_entropies is None:
            raise UsageError("the loss uses entropies, and must set needs_entropies = True to be given them")
        return self.all_entropies

    @cached_property
    def sample_of(self) -> torch.Tensor:
        """Which sample of the micro-batch each token belongs to: int64 [R, N], counted from 0, row by row.

        The padding of a row counts as a sample.
        """
        starts = (self.micro.position_ids == 0).flatten().cumsum(0)
        return (starts - 1).view_as(self.micro.position_ids)[:, 1:]

    def sum_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of `values` [R, N] over the learned tokens of each sample: [samples].

        `sums[inputs.sample_of]` hands a sample's sum back to its tokens.
        """
        learned = torch.where(self.mask, values, 0).flatten()
        return learned.new_zeros(self.micro.samples).index_add(0, self.sample_of.flatten(), learned)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """How many tokens of each sample are learned, float32 [samples]."""
        return self.sum_by_sample(torch.ones_like(self.logprobs))

    def of_samples(self, name: str) -> torch.Tensor:
        """A column that has one value for all tokens of a sample: [samples].

        Raises:
            UsageError: the batch has no such column.
        """
        self.column(name)
        return self.micro.columns[name].flatten()[self.micro.bounds[:-1]]


@dataclass
class LossSums:
    """Sums over a micro-batch's learned tokens; `maxima` holds largest values instead.

    loss: scalar, with gradient; the step's loss is the sum over all micro-batches, divided by the loss's
    normaliser. The others are for metrics.jsonl, scalars without gradient, under the same names for every
    micro-batch: `means` are divided by the number of the step's learned tokens, and `averages` by a sum of
    their own, such as that of weights: (what is averaged, its weights), both summed over all micro-batches.
    """

    loss: torch.Tensor
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Loss(ABC):
    """What a step minimises. Its constructor gets the settings of the loss's type as keyword arguments."""

    needs_old: bool = False
    """Whether it asks for `LossInputs.old_logprobs`."""
    needs_entropies: bool = False
    """Whether it uses `LossInputs.entropies`, which cost a second pass over the logits."""
    needs_reference: bool = False
    """For losses of preferences: whether it asks for the column `reference_logps`."""
    form: str | None = None
    """For losses of preferences: what its records must be, a name in `cairn.config.pair_loss.TOGETHER`."""
    takes_kl: bool = False
    """Whether it subtracts `kl` from what each token adds to its objective."""
    kl: "KLPenalty | None" = None
    """The penalty on the divergence from a reference, if the run asks for one in the loss."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over one micro-batch; how samples are spread over micro-batches must not matter."""

    def normaliser(self, counts: BatchCounts) -> float:
        """What the step's sum is divided by, above 0; unless overridden, the number of learned tokens.

        Args:
            counts: of the whole step, over all ranks.
        """
        return max(counts.learned, 1)
