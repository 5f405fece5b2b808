"""What a loss is given, and what it returns; and a term that any loss of RL may have, the KL penalty.

The KL divergence from a reference is estimated from each token that the policy has sampled. With
d = log(policy / reference) of the token (http://joschu.net/blog/kl-approx.html): k1 = d, k2 = d^2 / 2,
k3 = exp(-d) - 1 + d. The means of k1 and k3 over the policy's samples are KL(policy || reference), k3's with
less variance and never below 0; k2's is near it where the two are close.

Their gradients mean something else (arXiv:2510.01555): for samples of the current policy, that of k1 is 0
on average, that of k2 is the gradient of KL(policy || reference), and that of k3 the gradient of
KL(reference || policy), to which the former is equal only to first order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from cairn.config.teachers import REFERENCE_LOGPROBS
from cairn.run.errors import UsageError
from cairn.trainer.packing import BatchCounts, MicroBatch

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
    their own, such as a sum of weights: (what is averaged, its weights), both summed over all micro-batches.
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
    """For losses of preferences: what its records must be, a name in `cairn.config.preferences.TOGETHER`."""
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
