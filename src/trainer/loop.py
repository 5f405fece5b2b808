"""The one training loop, for SFT and RL alike.

They differ in where batches come from and in the loss. Everything random in a step is seeded from the step's
number, and sums run over micro-batches in their order, so going on from a checkpoint is the same as never
having stopped.
"""

import contextlib
import logging
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
from cairn.run.seeds import derive
from cairn.trainer.group import Group
from cairn.trainer.losses import LossFunction, LossSums, PolicyLoss, sft_loss
from cairn.trainer.model import build_model, weights
from cairn.trainer.optimizer import learning_rate, make_optimizer
from cairn.trainer.packing import Work, make_work
from cairn.trainer.prefetch import Prefetch
from cairn.trainer.rl_data import RLData, VersionPublisher
from cairn.trainer.sft_data import SFTData, check_identity, identity_of
from cairn.trainer.state import Progress, TrainerCheckpoints, TrainerState
from cairn.trainer.tracking import Tracker

logger = logging.getLogger(__name__)


class TrainingDiverged(Exception):
    """The gradient is not finite; the weights are as they were before the step."""


def train(config: SFTConfig | TrainerConfig, attempt: Attempt, group: Group) -> Outcome:
    """Train from `attempt.start_step` to `config.max_steps`; all ranks call it.

    `config.model.name` is the local directory to start from, unless the attempt resumes.

    Raises:
        TrainingDiverged: a gradient is not finite.
        DeadlinePassed: another role did not answer in time.
        CheckpointError: the checkpoint to go on from can't be used.
    """
    with contextlib.ExitStack() as closing:
        return _train(config, attempt, group, closing)


def _train(
    config: SFTConfig | TrainerConfig, attempt: Attempt, group: Group, closing: contextlib.ExitStack
) -> Outcome:
    heartbeat.doing(f"loading what step {attempt.start_step} left")
    run = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
    resume_from = Path(attempt.resume_from) if attempt.resume_from else None
    model_folder = resume_from / "model" if resume_from else Path(config.model.name)
    model = build_model(model_folder, config, group.mesh)
    optimizer = make_optimizer(model.parameters(), config.optimizer)
    state = TrainerState(config, group, model, optimizer, Progress())
    parent = None
    if resume_from:
        parent = state.load(resume_from)
    else:
        read_tensors(model_folder, weights(model), "model")

    publisher = None
    if isinstance(config, SFTConfig):
        loss_function = sft_loss
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        data = SFTData(config.data, tokenizer, config.seed, state.progress.total_samples)
        check_identity(config.data.name, data.records, state.data_identity)
    else:
        loss_function = PolicyLoss(config.loss)
        data = RLData(config, run, attempt)
        publisher = VersionPublisher(run, attempt, group)
    checkpoints = None
    if config.ckpt:
        store = CheckpointStore(run.checkpoints)
        identity = identity_of(data.records) if isinstance(data, SFTData) else None
        checkpoints = TrainerCheckpoints(
            state, store, attempt, model_folder, parent, identity, run.forget_batches
        )
        closing.callback(checkpoints.abandon)

    tracker = Tracker(config, run, attempt) if group.rank == 0 else None
    if tracker:
        closing.callback(tracker.close)

    def next_work(step: int) -> Work:
        return make_work(data.next_batch(step), config, rank=group.rank, world_size=group.world_size)

    prefetch = None
    if isinstance(data, SFTData):  # an RL batch may need what this step publishes
        prefetch = Prefetch(next_work, state.progress.step + 1, config.max_steps)
        closing.callback(prefetch.close)
    stopped, save, saved_at = None, False, time.monotonic()
    for step in range(state.progress.step + 1, config.max_steps + 1):
        heartbeat.doing(f"getting the batch of step {step}")
        waited_from = time.monotonic()
        work = prefetch.get(step) if prefetch else next_work(step)
        started = time.monotonic()
        before_update = checkpoints.before_update if checkpoints else None
        meanwhile = partial(prefetch.make_ready, step + 1) if prefetch else None
        row = train_step(state, work, step, loss_function, before_update, meanwhile)
        row |= work.metrics
        replay = publisher is not None and publisher.is_replay(step)
        asked_to_stop, overdue, replay, others_save = group.any_of(
            run.stop_requested() is not None,
            _overdue(config, time.monotonic() - saved_at),
            replay,
            replay and publisher.announced_save(step),
        )
        last = step == config.max_steps or (asked_to_stop and not replay)
        save = checkpoints is not None and (last or overdue or _due(config, step))
        if replay:  # the orchestrator knows this step: it can be saved only if that one saves its part
            save = save and (others_save or checkpoints.others_saved(step))
        if publisher and not replay:
            publisher.publish(step, model, save=save and config.ckpt.training_state, last=last)
        if tracker:
            times = {"time/wait": started - waited_from, "time/step": time.monotonic() - started}
            digest = {"batch/digest": work.digest}
            tracker.log({"step": step, **row, **asdict(state.progress), **digest, **times})
        if checkpoints:
            if step == attempt.start_step + 1:
                checkpoints.prepare()
            if save:
                checkpoints.save(row, wait=not config.ckpt.save_async)
                saved_at = time.monotonic()
            _report(checkpoints.check())
        if last:
            if asked_to_stop and step < config.max_steps:
                stopped = f"asked to stop at step {step}"
            break
    heartbeat.doing(f"finishing after step {state.progress.step}")
    if checkpoints:
        _report(checkpoints.finish())
    group.barrier()
    return Outcome(state.progress.step, stopped, save)


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
        torch.manual_seed(derive(config.seed, "dropout", step, micro.index))
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
        "learned_tokens": tokens,
        **({"cut_samples": work.cut} if work.cut else {}),
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
