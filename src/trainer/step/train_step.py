"""One step: forward and backward passes over a rank's micro-batches, then the update; or several of both.

What a step trains are learners: each a model, and the loss that is computed from its outputs.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cairn.config.optimizer import BaseOptimizerConfig, SchedulerConfig
from cairn.config.trainer import TrainerBase
from cairn.run import heartbeat
from cairn.run.errors import UsageError
from cairn.run.seeds import derive
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Loss, LossInputs, LossSums
from cairn.trainer.models.trained import Trained
from cairn.trainer.packing import BatchCounts, MicroBatch, RankBatch, UpdateBatch
from cairn.trainer.state import TrainerState
from cairn.trainer.step.rewinds import Rewinder


class Learner(ABC):
    """A model that learns from each batch; a step trains all learners on the same micro-batches.

    name: what its metrics begin with, with a slash, and errors call it; "" for the policy. loss_name: what
    errors call its loss.
    """

    name: str
    loss_name: str
    model: Trained
    optimizer: BaseOptimizerConfig | None = None
    """Settings of its optimiser; None: the policy's."""
    scheduler: SchedulerConfig | None = None
    """Its learning rate schedule; None: the policy's."""

    @abstractmethod
    def normaliser(self, counts: BatchCounts) -> float:
        """What the sum over an update's micro-batches is divided by, above 0; `counts` is of all ranks."""

    @abstractmethod
    def outputs(self, micro: MicroBatch, temperature: float) -> Any:
        """The forward pass of one micro-batch, which is on the model's device.

        Args:
            temperature: of the sampler.
        """

    @abstractmethod
    def sums(self, micro: MicroBatch, outputs: Any) -> LossSums:
        """The loss of what `outputs` has returned."""

    def added_to(
        self, loss: torch.Tensor, sums: LossSums, micro: MicroBatch, counts: BatchCounts, ranks: int
    ) -> torch.Tensor:
        """The micro-batch's loss with what the model itself adds to it, such as balance between experts.

        Args:
            loss: divided by the normaliser, and scaled for the backend's mean over `ranks`.
        """
        return loss


class PolicyLearner(Learner):
    """The policy, with the loss that the configuration chooses."""

    name = ""

    def __init__(self, state: TrainerState, loss: Loss, seen: Callable[[LossInputs], None]):
        """Train `state`'s policy; `seen` is shown what the loss is computed from, before it is."""
        self.model = state.policy
        self.loss_name = type(loss).__name__
        self._state = state
        self._loss = loss
        self._seen = seen

    def normaliser(self, counts: BatchCounts) -> float:
        return self._loss.normaliser(counts)

    def outputs(self, micro: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logprobs of the learned tokens, and entropies if the loss needs them."""
        with self._state.balance.watching():
            return self._state.scorer.scores(micro, temperature, entropies=self._loss.needs_entropies)

    def sums(self, micro: MicroBatch, outputs: tuple[torch.Tensor, torch.Tensor | None]) -> LossSums:
        logprobs, entropies = outputs
        inputs = LossInputs.of(logprobs, micro, entropies)
        self._seen(inputs)
        return self._loss(inputs)

    def added_to(
        self, loss: torch.Tensor, sums: LossSums, micro: MicroBatch, counts: BatchCounts, ranks: int
    ) -> torch.Tensor:
        return self._state.balance.added_to(loss, sums, micro, counts, ranks)


NO_REWINDS = Rewinder()


def _nothing(_: object = None) -> None:
    pass


def train_step(
    state: TrainerState,
    batch: RankBatch,
    step: int,
    loss: Loss,
    before_update: Callable[[], None] = _nothing,
    *,
    further_learners: Sequence[Learner] = (),
    with_policy: bool = True,
    seen: Callable[[LossInputs], None] = _nothing,
    rewinder: Rewinder = NO_REWINDS,
) -> dict[str, float]:
    """One step, in place: as many updates of the weights as the batch asks for; returns the step's metrics.

    An update sums the loss over its part of the batch, on whichever ranks it is, and divides it by the loss's
    normaliser.
    Weights and optimiser state change only after `before_update` has returned. Updates that the guard
    against spikes refuses change nothing.

    Args:
        loss: of the policy.
        further_learners: models that learn from the same batch, each with a loss of its own.
        with_policy: False leaves the policy as it is; there must be further learners.
        seen: shown what the policy's loss of each micro-batch is computed from, before it is.
        rewinder: where updates that the guard refuses lead back to. Then the step's others are left out, too.

    Raises:
        TrainingDiverged: a gradient is not finite, or too many in a row spike.
    """
    config, counts = state.config, batch.counts
    learners = (
        [PolicyLearner(state, loss, seen), *further_learners] if with_policy else list(further_learners)
    )
    rows: list[StepMetrics] = []
    skipped, rewound_to = 0, None
    for number in range(batch.updates):
        update = Update(state, batch.parts[number % len(batch.parts)], batch.temperature, step, number)
        rows.append(update.gradients(learners))
        spike = state.spikes.spike_in(rows[-1].means, update.name, rewinder.known(step, number))
        if number == 0:
            before_update()
        for learner in learners:
            if spike is None:
                state.backend_of(learner.model).step(learner.model, _rate(learner, config, step))
            learner.model.optimizer.zero_grad(set_to_none=True)
        if spike is not None:
            rewound_to = rewinder.rewind(step, number, spike)
            skipped = skipped + 1 if rewound_to is None else batch.updates
        if rewound_to is not None:
            break

    progress = state.progress
    progress.step = step
    progress.total_tokens += counts.tokens
    progress.total_samples += counts.records
    metrics = StepMetrics.over(rows)
    if skipped:
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        metrics["skipped_updates"] = skipped
    if rewound_to is not None:
        metrics["rewound_to"] = rewound_to
    return {
        **metrics,
        **{_prefix(learner) + "lr": _rate(learner, config, step) for learner in learners},
        "samples": counts.samples,
        "learned_tokens": counts.learned,
        "packing_efficiency": counts.tokens / counts.computed,
        **({"cut_samples": counts.cut, "lost_tokens": counts.lost} if counts.cut else {}),
        **({"unlearned_samples": counts.unlearned} if counts.unlearned else {}),
    }


@dataclass
class StepMetrics:
    """Metrics of one update: `means`, and `maxima`, of which a step of several updates shows the largest."""

    means: dict[str, float]
    maxima: dict[str, float]

    @staticmethod
    def over(updates: "Sequence[StepMetrics]") -> dict[str, float]:
        """Those of a step."""
        first = updates[0]
        if len(updates) == 1:
            return first.means | first.maxima
        means = {name: statistics.fmean(one.means[name] for one in updates) for name in first.means}
        return means | {name: max(one.maxima[name] for one in updates) for name in first.maxima}


@dataclass
class Update:
    """One update of a step: number `number` (from 0) of `step`, from a part of its batch."""

    state: TrainerState
    part: UpdateBatch
    temperature: float
    step: int
    number: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"step {self.step}" + (f", update {self.number + 1}" if self.number else "")

    def gradients(self, learners: Sequence[Learner]) -> StepMetrics:
        """Accumulate and clip each learner's gradient."""
        found = StepMetrics({}, {})
        for learner in learners:
            metrics = self._gradient(learner)
            prefix = _prefix(learner)
            found.means |= {prefix + name: value for name, value in metrics.means.items()}
            found.maxima |= {prefix + name: value for name, value in metrics.maxima.items()}
        return found

    def _gradient(self, learner: Learner) -> StepMetrics:
        config, group, counts = self.state.config, self.state.group, self.part.counts
        backend = self.state.backend_of(learner.model)
        ranks, normaliser = backend.averaged_over, _normaliser(learner, counts)

        def forward(micro: MicroBatch) -> Any:
            heartbeat.doing(f"step {self.step}, micro-batch {micro.index}")
            group.seed(self._dropout_seed(micro.index))
            return learner.outputs(micro, self.temperature)

        def loss(micro: MicroBatch, outputs: Any) -> tuple[torch.Tensor, LossSums]:
            sums = learner.sums(micro, outputs)
            scaled = sums.loss * (ranks / normaliser)
            return learner.added_to(scaled, sums, micro, counts, ranks), sums

        all_sums = backend.forward_backward(learner.model, self.part.micros, forward, loss)
        settings = learner.optimizer or config.optimizer
        norm = backend.norm_and_clip(learner.model, settings.max_grad_norm)
        # Metrics are read here together with the norm, which must be known before the weights change.
        metrics, gradient_norm = _combine(all_sums, norm, normaliser, max(counts.learned, 1), group)
        metrics.means["grad_norm"] = gradient_norm
        return metrics

    def _dropout_seed(self, micro: int) -> int:
        about = (self.step, micro) if self.number == 0 else (self.step, micro, "update", self.number)
        return derive(self.state.config.seed, "dropout", *about)


def _prefix(learner: Learner) -> str:
    """What the names of its metrics begin with."""
    return f"{learner.name}/" if learner.name else ""


def _rate(learner: Learner, config: TrainerBase, step: int) -> float:
    """Its learning rate in a step."""
    schedule, settings = learner.scheduler or config.scheduler, learner.optimizer or config.optimizer
    return schedule.rate(step, settings.lr, schedule.steps or config.max_steps)


def _normaliser(learner: Learner, counts: BatchCounts) -> float:
    normaliser = learner.normaliser(counts)
    if not 0 < normaliser < math.inf:
        raise UsageError(f"the normaliser of {learner.loss_name} is {normaliser}, and must be above 0")
    return normaliser


def _combine(
    all_sums: list[LossSums], norm: torch.Tensor, normaliser: float, tokens: int, group: RankGroup
) -> tuple[StepMetrics, float]:
    """Metrics of the whole update, and `norm`, which is equal on all ranks, in one read from the device.

    Metrics are summed in the order of micro-batches whatever rank they ran on.
    """
    first = all_sums[0]
    means, maxima, averages = list(first.means), list(first.maxima), list(first.averages)
    rows = [
        torch.stack(
            [
                s.loss.detach(),
                *(s.means[k] for k in means),
                *(summed for k in averages for summed in s.averages[k]),
                *(s.maxima[k] for k in maxima),
                norm,
            ]
        ).double()
        for s in all_sums
    ]
    table = group.gather_micros(torch.stack(rows))  # [micro-batch, metric]
    table, norms = table[:, :-1], table[:, -1]
    of_means, of_averages = 1 + len(means), 1 + len(means) + 2 * len(averages)
    totals = table[:, :of_averages].cumsum(0)[-1]
    peaks = table[:, of_averages:].amax(0)
    values, weights = totals[of_means:].view(-1, 2).T
    found = torch.cat(
        [totals[:1] / normaliser, totals[1:of_means] / tokens, values / weights.clamp(min=1e-9)]
    )
    metrics = StepMetrics(
        dict(zip(["loss", *means, *averages], found.tolist(), strict=True)),
        dict(zip(maxima, peaks.tolist(), strict=True)),
    )
    return metrics, norms.tolist()[0]
