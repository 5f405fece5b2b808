"""One optimiser step: forward and backward passes over a rank's micro-batches, then the update."""

import math
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from cairn.run import heartbeat
from cairn.run.errors import CairnError, UsageError
from cairn.run.seeds import derive
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Loss, LossInputs, LossSums
from cairn.trainer.packing import BatchCounts, RankBatch
from cairn.trainer.state import TrainerState


class TrainingDiverged(CairnError):
    """The gradient is not finite; the weights are as they were before the step."""


def _nothing() -> None:
    pass


def train_step(
    state: TrainerState,
    batch: RankBatch,
    step: int,
    loss: Loss,
    before_update: Callable[[], None] = _nothing,
    meanwhile: Callable[[], None] = _nothing,
) -> dict[str, float]:
    """One optimiser step, in place; returns its metrics.

    The loss is summed over the whole batch, on whichever ranks it is, and divided by the loss's normaliser.
    Every micro-batch's gradient is reduced at once, so a rank holds the gradient of its shards, never of the
    whole model.
    Weights and optimiser state change only after `before_update` has returned. `meanwhile` is called before
    the last backward pass, during which this thread needs neither Python nor, on a GPU, the processor.

    Raises:
        TrainingDiverged: the gradient is not finite.
    """
    config, group, policy = state.config, state.group, state.policy
    counts = batch.counts
    normaliser = _normaliser(loss, counts)
    all_sums = []
    for micro in batch.micros:
        heartbeat.doing(f"step {step}, micro-batch {micro.index}")
        group.seed(derive(config.seed, "dropout", step, micro.index))
        micro = micro.to(group.device)
        with state.balance.watching():
            logprobs = state.scorer.logprobs(micro, batch.temperature)
        sums = loss(LossInputs.of(logprobs, micro))
        if micro.index == batch.micros[-1].index:
            meanwhile()
        # FSDP2 averages gradients over ranks; the sum is wanted.
        scaled = sums.loss * (group.world_size / normaliser)
        state.balance.added_to(scaled, sums, micro, counts, group.world_size).backward()
        all_sums.append(sums)

    norm = torch.nn.utils.clip_grad_norm_(policy.trained().values(), config.optimizer.max_grad_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    # Metrics are read here together with the norm, which must be known before the weights change.
    metrics, gradient_norm = _combine(all_sums, norm, normaliser, max(counts.learned, 1), group)
    if not math.isfinite(gradient_norm):
        raise TrainingDiverged(
            f"step {step}: the gradient's norm is {gradient_norm}; lower optimizer.lr, or look at the batch"
        )
    rate = config.scheduler.rate(step, config.optimizer.lr, config.scheduler.steps or config.max_steps)
    for parameters in policy.optimizer.param_groups:
        parameters["lr"] = rate
    before_update()
    policy.optimizer.step()
    policy.optimizer.zero_grad(set_to_none=True)

    progress = state.progress
    progress.step = step
    progress.total_tokens += counts.tokens
    progress.total_samples += counts.samples
    return {
        **metrics,
        "lr": rate,
        "grad_norm": gradient_norm,
        "learned_tokens": counts.learned,
        **({"cut_samples": counts.cut} if counts.cut else {}),
        **({"unlearned_samples": counts.unlearned} if counts.unlearned else {}),
    }


def _normaliser(loss: Loss, counts: BatchCounts) -> float:
    normaliser = loss.normaliser(counts)
    if not 0 < normaliser < math.inf:
        raise UsageError(f"the normaliser of {type(loss).__name__} is {normaliser}, and must be above 0")
    return normaliser


def _combine(
    all_sums: list[LossSums], norm: torch.Tensor, normaliser: float, tokens: int, group: RankGroup
) -> tuple[dict[str, float], float]:
    """Metrics of the whole step, and `norm`, which is equal on all ranks, in one read from the device.

    Metrics are summed in the order of micro-batches whatever rank they ran on.
    """
    means, maxima = list(all_sums[0].means), list(all_sums[0].maxima)
    rows = [
        torch.stack(
            [s.loss.detach(), *(s.means[k] for k in means), *(s.maxima[k] for k in maxima), norm]
        ).double()
        for s in all_sums
    ]
    table = group.gather_rows(torch.stack(rows)).transpose(0, 1).flatten(0, 1)  # [micro-batch, metric]
    table, norms = table[:, :-1], table[:, -1]
    totals = table[:, : 1 + len(means)].cumsum(0)[-1]
    totals = torch.cat([totals[:1] / normaliser, totals[1:] / tokens])
    peaks = table[:, 1 + len(means) :].amax(0)
    metrics = dict(zip(["loss", *means, *maxima], [*totals.tolist(), *peaks.tolist()], strict=True))
    return metrics, norms.tolist()[0]
