"""The one training loop, for SFT and RL alike.

They differ in where batches come from and in the loss. Everything random in a step is seeded from the step's
number, and sums run over micro-batches in their order, so going on from a checkpoint is the same as never
having stopped.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from cairn.checkpoint.saver import Saved
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import read_tensors
from cairn.config.trainer import SFTConfig, TrainerBase, TrainerConfig
from cairn.run import heartbeat
from cairn.run.directory import Attempt, Outcome, RunDirectory
from cairn.run.errors import CairnError
from cairn.run.files import read_json
from cairn.run.recipe import template_arguments
from cairn.run.seeds import derive
from cairn.trainer.group import Group
from cairn.trainer.losses import LossFunction, LossSums, PolicyLoss, sft_loss
from cairn.trainer.model import build_model, weights_in
from cairn.trainer.optimizer import learning_rate, make_optimizer
from cairn.trainer.packing import Work, make_work
from cairn.trainer.prefetch import Prefetch
from cairn.trainer.probe import make_probe
from cairn.trainer.records import BadRecord, examine, same_records
from cairn.trainer.rl_data import RLData, VersionPublisher
from cairn.trainer.sft_data import SFTData
from cairn.trainer.state import Progress, TrainerCheckpoints, TrainerState
from cairn.trainer.tracking import Tracker

logger = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that makes something ready hands Python back to the one that trains."""


class TrainingDiverged(CairnError):
    """The gradient is not finite; the weights are as they were before the step."""


def train(config: SFTConfig | TrainerConfig, attempt: Attempt, group: Group) -> Outcome:
    """Train from `attempt.start_step` to `config.max_steps`; all ranks call it.

    `config.model.name` is the local directory to start from, unless the attempt resumes.

    Raises:
        TrainingDiverged: a gradient is not finite.
        DeadlinePassed: another role did not answer in time.
        CheckpointError: the checkpoint to go on from can't be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    with contextlib.ExitStack() as closing:
        return _Training(config, attempt, group, closing).run()


class _Training:
    """What the steps of one attempt work with, and what goes on around each of them."""

    def __init__(
        self,
        config: SFTConfig | TrainerConfig,
        attempt: Attempt,
        group: Group,
        closing: contextlib.ExitStack,
    ):
        """Load what `attempt` goes on from; `closing` ends what this starts."""
        step = attempt.start_step
        heartbeat.doing(f"loading the checkpoint of step {step}" if step else "loading the model")
        self.config, self.attempt, self.group = config, attempt, group
        self.run_directory = run = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
        resume_from = Path(attempt.resume_from) if attempt.resume_from else None
        model_folder = resume_from / "model" if resume_from else Path(config.model.name)
        model = build_model(model_folder, config, group.mesh)
        optimizer = make_optimizer(model.parameters(), config.optimizer)
        self.state = TrainerState(config, group, model, optimizer, Progress())
        parent = None
        if resume_from:
            parent = self.state.load(resume_from)
        else:
            read_tensors(model_folder, weights_in(model, model_folder), "model")
        heartbeat.doing("checking the model")
        self.state.check_model()

        self._prefetch = self._publisher = self._checkpoints = self._tracker = None
        recipe = (read_json(run.recipe, dict) or {}).get("trainer", {})
        if isinstance(config, SFTConfig):
            self._loss_function = sft_loss
            tokenizer = AutoTokenizer.from_pretrained(model_folder)
            self._data = SFTData(
                config.data,
                tokenizer,
                config.seed,
                self.state.progress.total_samples - recipe.get("data", {}).get("begins_at", 0),
                row_length=config.seq_len,
                template_arguments=template_arguments(recipe),
            )
            identity = examine(config.data, self._data.records)
            if not same_records(identity, recipe.setdefault("data", identity)):
                raise BadRecord(f"{config.data.name} holds other records than when the run was started")
            self._data.check_start()
            first = self.state.progress.step + 1
            self._prefetch = Prefetch(self._next_work, first, config.max_steps)
            closing.callback(self._prefetch.close)
        else:  # a batch may need what the step before it publishes, so none is asked for ahead
            self._loss_function = PolicyLoss(config.loss)
            self._data = RLData(config, run, attempt)
            network = config.weight_transport == "network"
            step = self.state.progress.step
            score_probe = partial(make_probe, self.state.scorer, group.device, config)
            probe = score_probe if config.self_check else None
            self._publisher = VersionPublisher(
                run, attempt, group, model, step, network=network, make_probe=probe
            )
            closing.callback(self._publisher.close)
        if config.ckpt:
            store = CheckpointStore(run.checkpoints)
            self._checkpoints = TrainerCheckpoints(
                self.state, store, attempt, model_folder, parent, recipe, run
            )
            closing.callback(self._checkpoints.abandon)
        if group.rank == 0:
            self._tracker = Tracker(config, run, attempt)
            closing.callback(self._tracker.close)
        self._saved_at = time.monotonic()

    def _next_work(self, step: int) -> Work:
        batch = self._data.next_batch(step)
        return make_work(
            batch,
            self.config,
            rank=self.group.rank,
            world_size=self.group.world_size,
            arrange=self.state.scorer.rows.arrange,
        )

    def run(self) -> Outcome:
        """All steps, or as many as there are before somebody asks to stop."""
        config, progress = self.config, self.state.progress
        # Who died after the last save has nothing left to do, and would wait for a batch that never comes.
        ended = self._publisher is not None and self._publisher.announced(progress.step)[1]
        (ended,) = self.group.any_of(ended)
        save = asked_to_stop = ended
        for step in range(progress.step + 1, progress.step + 1 if ended else config.max_steps + 1):
            heartbeat.doing(f"getting the batch of step {step}")
            waited_from = time.monotonic()
            work = self._prefetch.get(step) if self._prefetch else self._next_work(step)
            started = time.monotonic()
            row = self._train_on(work, step)
            save, last, asked_to_stop = self._decide_and_publish(step)
            if self._tracker:
                times = {"time/wait": started - waited_from, "time/step": time.monotonic() - started}
                digest = {"batch/digest": work.digest}
                self._tracker.log({"step": step, **row, **asdict(progress), **digest, **times})
            if self._checkpoints:
                self._keep(step, row, save=save)
            if last:
                break
        heartbeat.doing(f"finishing after step {progress.step}")
        if self._checkpoints:
            _report(self._checkpoints.finish())
        self.group.barrier()
        early = asked_to_stop and progress.step < config.max_steps
        return Outcome(progress.step, f"asked to stop at step {progress.step}" if early else None, save)

    def _train_on(self, work: Work, step: int) -> dict[str, float]:
        """The step itself; returns its metrics."""
        heartbeat.holds_unsaved(True)
        meanwhile = partial(self._prefetch.make_ready, step + 1) if self._prefetch else None
        row = train_step(self.state, work, step, self._loss_function, self._before_update, meanwhile)
        return row | work.metrics

    def _before_update(self) -> None:
        """Whoever reads the weights off the training thread is done when this returns."""
        if self._checkpoints:
            self._checkpoints.before_update()
        if self._publisher:
            self._publisher.before_update()

    def _decide_and_publish(self, step: int) -> tuple[bool, bool, bool]:
        """Whether to save after `step`, whether it is the last, and whether somebody asked for that.

        The same on all ranks. The new policy is announced with it.
        """
        config, publisher = self.config, self._publisher
        replay = publisher is not None and publisher.is_replay(step)
        asked_to_stop, overdue, replay, others_save, others_end = self.group.any_of(
            self.run_directory.stop_requested() is not None,
            _overdue(config, time.monotonic() - self._saved_at),
            replay,
            *(publisher.announced(step) if replay else (False, False)),
        )
        last = step == config.max_steps or others_end or (asked_to_stop and not replay)
        save = self._checkpoints is not None and (last or overdue or _due(config, step))
        if replay:  # the orchestrator knows this step: it can be saved only if that one saves its part
            save = save and (others_save or self._checkpoints.others_saved(step))
            publisher.publish_again(step)
        elif publisher:
            with_orchestrator = save and config.ckpt.training_state
            publisher.publish(step, save=with_orchestrator, last=last)
        return save, last, asked_to_stop

    def _keep(self, step: int, row: dict[str, float], *, save: bool) -> None:
        """Save if it is time to, and see how earlier saves went."""
        if step == self.attempt.start_step + 1:
            self._checkpoints.prepare()
        if save:
            self._checkpoints.save(row, wait=not self.config.ckpt.save_async)
            self._saved_at = time.monotonic()
        _report(self._checkpoints.check())


def _due(config: TrainerBase, step: int) -> bool:
    return config.ckpt.interval is not None and step % config.ckpt.interval == 0


def _overdue(config: TrainerBase, seconds: float) -> bool:
    minutes = config.ckpt and config.ckpt.interval_minutes
    return minutes is not None and seconds >= 60 * minutes


def _report(saves: list[Saved]) -> None:
    for saved in saves:
        logger.info(
            "step %d saved: durable after %.3f s, of which training stood still for %.3f s",
            saved.step,
            saved.durable_seconds,
            saved.stall_seconds,
        )


def train_step(
    state: TrainerState,
    work: Work,
    step: int,
    loss_function: LossFunction,
    before_update: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, float]:
    """One optimiser step, in place; returns its metrics.

    The loss is a mean over all learned tokens of the batch, on whichever rank they are. Weights and optimiser
    state change only after `before_update` has returned. `meanwhile` is called before the last backward pass,
    during which this thread needs neither Python nor, on a GPU, the processor.

    Raises:
        TrainingDiverged: the gradient is not finite.
    """
    config, group, model = state.config, state.group, state.model
    tokens = max(work.learned, 1)
    all_sums = []
    for micro in work.micros:
        heartbeat.doing(f"step {step}, micro-batch {micro.index}")
        group.seed(derive(config.seed, "dropout", step, micro.index))
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(micro is work.micros[-1])
        micro = micro.to(group.device)
        sums = loss_function(state.scorer.logprobs(micro, work.temperature), micro)
        if meanwhile and micro.index == work.micros[-1].index:
            meanwhile()
        # FSDP2 averages gradients over ranks; the sum is wanted.
        (sums.loss * (group.world_size / tokens)).backward()
        all_sums.append(sums)

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not torch.isfinite(norm):
        raise TrainingDiverged(
            f"step {step}: the gradient's norm is {norm.item()}; lower optimizer.lr, or look at the batch"
        )
    rate = learning_rate(step, config.optimizer, config.scheduler, config.scheduler.steps or config.max_steps)
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = rate
    if before_update:
        before_update()
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)

    progress = state.progress
    progress.step = step
    progress.total_tokens += work.tokens
    progress.total_samples += work.samples
    return {
        **_combine(all_sums, tokens, group),
        "lr": rate,
        "grad_norm": norm.item(),
        "learned_tokens": work.learned,
        **({"cut_samples": work.cut} if work.cut else {}),
        **({"unlearned_samples": work.unlearned} if work.unlearned else {}),
    }


def _combine(all_sums: list[LossSums], tokens: int, group: Group) -> dict[str, float]:
    """Metrics of the whole step, summed in the order of micro-batches whatever rank they ran on."""
    means, maxima = list(all_sums[0].means), list(all_sums[0].maxima)
    rows = [
        torch.stack([s.loss.detach(), *(s.means[k] for k in means), *(s.maxima[k] for k in maxima)]).double()
        for s in all_sums
    ]
    table = group.gather_rows(torch.stack(rows)).transpose(0, 1).flatten(0, 1)  # [micro-batch, metric]
    totals = table[:, : 1 + len(means)].cumsum(0)[-1] / tokens
    peaks = table[:, 1 + len(means) :].amax(0)
    return dict(zip(["loss", *means, *maxima], [*totals.tolist(), *peaks.tolist()], strict=True))
