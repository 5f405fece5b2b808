"""The losses that clients may name, as the API defines them: sums over tokens, not means."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from cairn.run.batches import WEIGHTS
from cairn.service.wire import CallRefused, Pass
from cairn.trainer.losses.cispo import Cispo
from cairn.trainer.losses.loss import Loss, LossInputs, LossSums
from cairn.trainer.losses.ppo_clip import PPOClip
from cairn.trainer.packing import MicroBatch


class WeightedLikelihood(Loss):
    """-w log p of each token, with a weight w of any sign."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        return LossSums(-(inputs.logprobs * inputs.column(WEIGHTS)).sum())


class Dro(Loss):
    """-(log p A - beta / 2 (log p - log q)^2) of each token, where q has sampled it (arXiv:2405.19107).

    Tokens without an advantage count as well: they are kept near q.
    """

    def __init__(self, beta: float):
        self._beta = beta

    def __call__(self, inputs: LossInputs) -> LossSums:
        distance = inputs.logprobs - inputs.sampler_logprobs
        values = inputs.logprobs * inputs.advantages - self._beta / 2 * distance.square()
        return LossSums(-torch.where(inputs.micro.loss_mask[:, 1:], values, 0.0).sum())


class ClientsGspo(Loss):
    """-min(r A, clip(r) A) of each token, where r has one value for a sample (GSPO-token, arXiv:2507.18071).

    That is the geometric mean of the ratios of the tokens that the client marks; its gradient is each token's
    own.
    """

    def __init__(self, low: float, high: float):
        self._low, self._high = low, high

    def __call__(self, inputs: LossInputs) -> LossSums:
        marked = replace(inputs, mask=inputs.column(COLUMNS[RATIO_MASK]) != 0)
        logprobs = inputs.logprobs
        difference = logprobs.detach() - inputs.sampler_logprobs
        mean = marked.sum_by_sample(difference) / marked.lengths.clamp(min=1)
        ratio = (mean[inputs.sample_of] + logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(self._low, self._high)
        values = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        return LossSums(-torch.where(inputs.mask, values, 0.0).sum())


@dataclass(frozen=True)
class ServedLoss:
    """A loss that clients may name.

    inputs: what it needs of each token, and whether it may be missing (then it is 1). settings: the numbers
    that `loss_fn_config` may give, with their defaults; None: the API says of none, so it has to be given.
    make: of these.
    """

    inputs: Mapping[str, bool]
    settings: Mapping[str, float | None]
    make: Callable[[Mapping[str, float]], Loss]


RATIO_MASK = "sequence_ratio_mask"
COLUMNS = {RATIO_MASK: WEIGHTS}
"""The columns of inputs that have another name in the API."""
OF_POLICY = {"logprobs": False, "advantages": False}
RATIOS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the ratio of probabilities, as the API gives them."""
LOSSES: dict[str, ServedLoss] = {
    "cross_entropy": ServedLoss({"weights": True}, {}, lambda given: WeightedLikelihood()),
    "importance_sampling": ServedLoss(OF_POLICY, {}, lambda given: PPOClip(clip_low=1.0, clip_high=math.inf)),
    "ppo": ServedLoss(
        OF_POLICY,
        RATIOS,
        lambda given: PPOClip(
            clip_low=1 - given["clip_low_threshold"], clip_high=given["clip_high_threshold"] - 1
        ),
    ),
    "cispo": ServedLoss(
        OF_POLICY, {"clip_high_threshold": 1.2}, lambda given: Cispo(ratio_max=given["clip_high_threshold"])
    ),
    "dro": ServedLoss(OF_POLICY, {"beta": None}, lambda given: Dro(given["beta"])),
    "gspo": ServedLoss(
        {**OF_POLICY, RATIO_MASK: False},
        dict.fromkeys(RATIOS),
        lambda given: ClientsGspo(given["clip_low_threshold"], given["clip_high_threshold"]),
    ),
}
"""By the name that the API has for it. The objective is a sum over tokens, as the API has it, not a mean."""


def loss_of(request: Pass) -> tuple[ServedLoss, Loss]:
    """The loss that a request names.

    Raises:
        CallRefused: there is no such loss here, or no such setting of it.
    """
    found = LOSSES.get(request.loss_fn)
    if found is None:
        raise CallRefused(
            f"loss_fn {request.loss_fn!r}: this service has {', '.join(LOSSES)}; forward_backward_custom "
            "takes any function of the logprobs"
        )
    for name, value in request.config.items():
        if name not in found.settings or not isinstance(value, int | float) or not math.isfinite(value):
            there = ", ".join(found.settings) or "no settings"
            raise CallRefused(
                f"loss_fn_config {name} = {value!r}: {request.loss_fn} takes {there}, which are numbers"
            )
    asked = {**found.settings, **{name: float(value) for name, value in request.config.items()}}
    if missing := [name for name, value in asked.items() if value is None]:
        raise CallRefused(
            f"loss_fn_config: {request.loss_fn} needs {', '.join(missing)}, which has no default; give it"
        )
    given = {name: value for name, value in asked.items() if value is not None}
    if given.get("clip_low_threshold", 0.0) > given.get("clip_high_threshold", math.inf):
        raise CallRefused("loss_fn_config: clip_low_threshold is above clip_high_threshold")
    return found, found.make(given)


def inputs_of(micro: MicroBatch, logprobs: torch.Tensor) -> LossInputs:
    """What the loss is computed of; tokens without an advantage are not learned."""
    inputs = LossInputs.of(logprobs, micro)
    advantages = inputs.columns.get("advantages")
    if advantages is None:
        return inputs
    return LossInputs(logprobs, inputs.mask & (advantages != 0), inputs.columns, micro)
