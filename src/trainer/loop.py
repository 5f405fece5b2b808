"""The one training loop, for SFT and RL alike.

They differ in where batches come from and in the loss. Everything random in a step is seeded from the step's
number, and sums run over micro-batches in their order, so going on from a checkpoint is the same as never
having stopped.
"""

import logging
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from cairn.checkpoint.store import CheckpointStore, origin
from cairn.config.trainer import SFTConfig, TrainerBase, TrainerConfig
from cairn.run.batches import Batch
from cairn.run.directory import Attempt, Outcome, RunDirectory
from cairn.run.seeds import derive
from cairn.trainer.group import Group
from cairn.trainer.losses import LossSums, PolicyLoss, sft_loss
from cairn.trainer.model import load_model
from cairn.trainer.optimizer import learning_rate, make_optimizer
from cairn.trainer.packing import MicroBatch, make_micro_batches
from cairn.trainer.rl_data import RLData, VersionPublisher
from cairn.trainer.sft_data import SFTData
from cairn.trainer.state import Progress, TrainerState
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
    run = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
    store = CheckpointStore(run.checkpoints)
    resume_from = Path(attempt.resume_from) if attempt.resume_from else None
    model_folder = resume_from / "model" if resume_from else Path(config.model.name)
    model = load_model(model_folder, config, group.mesh)
    optimizer = make_optimizer(model.parameters(), config.optimizer)
    state = TrainerState(config, attempt, group, model, optimizer, Progress(), model_folder)
    if resume_from:
        state.load(resume_from)
        state.parent = origin(resume_from)

    position = state.progress.total_samples
    publisher = None
    if isinstance(config, SFTConfig):
        loss_function = sft_loss
        data = SFTData(config.data, AutoTokenizer.from_pretrained(model_folder), config.seed, position)
    else:
        loss_function = PolicyLoss(config.loss)
        data = RLData(config, run, attempt, position)
        publisher = VersionPublisher(run, attempt, group)

    tracker = Tracker(config, run, attempt) if group.rank == 0 else None
    stopped, save = None, False
    for step in range(state.progress.step + 1, config.max_steps + 1):
        waited_from = time.monotonic()
        batch = data.next_batch(step)
        started = time.monotonic()
        row = {**train_step(state, batch, step, loss_function), **batch.metrics}
        asked_to_stop = group.rank == 0 and run.stop_requested() is not None
        ended = bool(group.gather_rows(torch.tensor([[float(asked_to_stop)]], dtype=torch.float64)).any())
        last = ended or step == config.max_steps
        save = config.ckpt is not None and (last or _due(step, config))
        if publisher:
            publisher.publish(step, model, save=save, last=last)
        if tracker:
            times = {"time/wait": started - waited_from, "time/step": time.monotonic() - started}
            tracker.log({"step": step, **row, **asdict(state.progress), **times})
        if save:
            seconds = state.save(store, row)
            logger.info("step %d saved in %.2f s", step, seconds)
            if tracker and publisher:
                run.forget_batches(step)
        if last:
            if ended and step < config.max_steps:
                stopped = f"asked to stop at step {step}"
            break
    group.barrier()
    if tracker:
        tracker.close()
    return Outcome(state.progress.step, stopped, save)


def _due(step: int, config: TrainerBase) -> bool:
    return config.ckpt.interval is not None and step % config.ckpt.interval == 0


def train_step(state: TrainerState, batch: Batch, step: int, loss_function) -> dict[str, float]:
    """One optimiser step on `batch`, in place; returns its metrics.

    The loss is a mean over all learned tokens of the batch, on whichever rank they are.

    Raises:
        TrainingDiverged: the gradient is not finite.
    """
    config, group, model = state.config, state.group, state.model
    samples = [sample.cut(config.seq_len) for sample in batch.samples]
    micros = make_micro_batches(
        samples,
        row_length=config.seq_len,
        rows_each=config.micro_batch_size,
        rank=group.rank,
        world_size=group.world_size,
    )
    tokens = max(sum(int(sample.loss_mask[1:].sum()) for sample in samples), 1)
    temperature = batch.info.get("temperature", 1.0)

    all_sums = []
    for micro in micros:
        torch.manual_seed(derive(config.seed, "dropout", step, micro.index))
        model.set_requires_gradient_sync(micro is micros[-1])
        sums = _forward(model, micro.to(group.device), temperature, loss_function)
        # FSDP2 averages gradients over ranks; the sum is wanted.
        (sums.loss * (group.world_size / tokens)).backward()
        all_sums.append(sums)

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm).full_tensor()
    if not torch.isfinite(norm):
        raise TrainingDiverged(
            f"step {step}: the gradient's norm is {norm.item()}; lower optimizer.lr, or look at the batch"
        )
    rate = learning_rate(step, config.optimizer, config.scheduler, config.scheduler.steps or config.max_steps)
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = rate
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)

    progress = state.progress
    progress.step = step
    progress.total_tokens += sum(len(sample.token_ids) for sample in samples)
    progress.total_samples += len(samples)
    cut = sum(len(sample.token_ids) > config.seq_len for sample in batch.samples)
    return {
        **_combine(all_sums, tokens, group),
        "lr": rate,
        "grad_norm": norm.item(),
        "learned_tokens": tokens,
        **({"cut_samples": cut} if cut else {}),
    }


def _forward(model, micro: MicroBatch, temperature: float, loss_function) -> LossSums:
    # Without a cache the model keeps apart samples whose positions start anew; with one it silently does not.
    logits = model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False).logits[:, :-1]
    logits = logits.float() / temperature if temperature != 1.0 else logits.float()
    labels = micro.input_ids[:, 1:]
    logprobs = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return loss_function(logprobs, micro)


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
