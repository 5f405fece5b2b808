"""The training loop, whatever the task.

Everything random in a step is seeded from the step's number, and sums run over micro-batches in their order,
so a run that goes on from a checkpoint computes what it would have computed without the interruption.
"""

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cairn.checkpoint.memory.memory_owners import RankHost
from cairn.checkpoint.memory.memory_slots import record_of
from cairn.checkpoint.saving.saver import Saved
from cairn.checkpoint.step_folder import StepFolder
from cairn.config.trainer import TrainerBase
from cairn.run import heartbeat, spans
from cairn.run.files import read_json
from cairn.run.messages import Attempt, Outcome
from cairn.trainer.checkpoints import make_checkpoints
from cairn.trainer.data.rendering import RecordRefused
from cairn.trainer.device import slow_network
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import RankBatch, make_rank_batch
from cairn.trainer.state import POLICY, Context, TrainerProgress, TrainerState
from cairn.trainer.step.rewinds import make_rewinder
from cairn.trainer.step.train_step import train_step
from cairn.trainer.step.utilisation import make_utilisation
from cairn.trainer.tasks import make_task, task_class
from cairn.trainer.tasks.task import Decision, Earlier
from cairn.trainer.tracking import make_tracker

logger = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0005
"""Seconds until a thread that is busy in Python lets another one run, such as the one that trains."""


def train(config: TrainerBase, attempt: Attempt, group: RankGroup, host: RankHost | None = None) -> Outcome:
    """Train from `attempt.start_step` to `config.max_steps`; all ranks call it.

    `config.model.name` is the local directory to start from, unless the attempt resumes. `host` says where
    this rank runs; without it no step is kept in memory.

    Raises:
        TrainingDiverged: a gradient is not finite.
        DeadlinePassed: another role did not answer in time.
        CheckpointError: the checkpoint to go on from can't be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    if (slow := slow_network(group)) and group.rank == 0:
        logger.warning(slow)
    with contextlib.ExitStack() as closing:
        return Training(config, attempt, group, closing, host).run()


class Training:
    """One attempt on one rank: what its steps work with, and what goes on around each of them."""

    def __init__(
        self,
        config: TrainerBase,
        attempt: Attempt,
        group: RankGroup,
        closing: contextlib.ExitStack,
        host: RankHost | None,
    ):
        """Load what `attempt` goes on from; `closing` ends what this starts."""
        step = attempt.start_step
        heartbeat.doing(f"loading the checkpoint of step {step}" if step else "loading the model")
        self.config, self.attempt, self.group = config, attempt, group
        self.run_directory = run = config.run_directory()
        resume_from = Path(attempt.resume_from) if attempt.resume_from else None
        model_folder = StepFolder(resume_from).model if resume_from else Path(config.model.name)
        models = {
            POLICY: task_class(config).policy(config, model_folder, group),
            **task_class(config).models(config, model_folder, group, resume_from),
        }
        self.state = TrainerState(config, group, models, TrainerProgress())
        parent = self.state.load(resume_from) if resume_from else self.state.begin(model_folder)
        heartbeat.doing("checking the model")
        self.state.check_model()

        recipe = (read_json(run.recipe, dict) or {}).get("trainer", {})
        context = Context(run, attempt, self.state, model_folder, recipe, host)
        self.task = make_task(config, context)
        closing.callback(self.task.close)
        if self.task.prefetch:
            self._batches = Prefetch(self._next_batch, self.state.progress.step + 1, config.max_steps)
        else:
            self._batches = OnDemand(self._next_batch)
        closing.callback(self._batches.close)
        context = replace(context, recipe={**recipe, **self.task.recipe})
        self._checkpoints = make_checkpoints(context, parent, self.task.parts, self.task.committed)
        closing.callback(self._checkpoints.abandon)
        self._rewinder = make_rewinder(config, self.state, run, attempt, self._checkpoints)
        record = record_of(resume_from) if resume_from else None
        self._unsaved = record is not None
        """Whether the step that this attempt starts from is in memory only."""
        self._row: dict[str, float] = dict(record.about["metrics"]) if record else {}
        """The metrics of that step."""
        self._too_late = False
        """Whether the newest step is not saved because the run must have ended before."""
        self._utilisation = make_utilisation(config, self.state)
        self._tracker = make_tracker(config, run, attempt, group.rank)
        closing.callback(self._tracker.close)

    def _next_batch(self, step: int) -> RankBatch | None:
        batch = self.task.next_batch(step)
        if batch is None:
            return None
        return make_rank_batch(
            batch,
            self.config,
            rank=self.group.layout.data.rank,
            world_size=self.group.layout.data.size,
            arrange=self.state.scorer.rows.arrange,
            mini_batches=self.task.mini_batches,
            updates=self.task.updates,
            spread=self.group.device.type == "cuda",  # on CPUs, bits do not depend on the number of ranks
        )

    def run(self) -> Outcome:
        """All steps, or as many as there are before somebody asks to stop."""
        config, progress = self.config, self.state.progress
        # A rank that died after the last save has nothing left to do: no further batch will come.
        asked_to_stop = Earlier(*self.group.any_of(*self.task.earlier(progress.step))).last
        save = ended = asked_to_stop or self.task.finished() is not None
        row, saved = self._row, list[Saved]()
        if progress.step == 0:
            self.task.validate(0)
        for step in range(progress.step + 1, progress.step + 1 if ended else config.max_steps + 1):
            heartbeat.doing(f"getting the batch of step {step}")
            waited_from = time.monotonic()
            try:
                batch = self._batches.get(step)
            except RecordRefused as error:  # on all ranks, which read the same records
                raise self._saved_before(error, row, saved=save) from None
            if batch is None:
                asked_to_stop, save = True, self._end_here(row, saved=save)
                break
            started = time.monotonic()
            row = self._train_on(batch, step)
            row |= self.task.validate(step)
            decision, asked_to_stop = self._decide(step)
            save = decision.save
            self.task.after_step(step, decision)
            times = {"time/wait": started - waited_from, "time/step": time.monotonic() - started}
            digest = {"batch/digest": batch.digest, "attention": str(self.state.scorer.attention)}
            saving = self._checkpoints.metrics()
            row |= self._tracker.chain({"step": step, **row, **asdict(progress), **digest})
            times |= _times(saved) | self._used(batch, step, {**row, **times})
            self._tracker.log({"step": step, **row, **asdict(progress), **digest, **times, **saving})
            if step == self.attempt.start_step + 1:
                self._checkpoints.prepare()
            if save:
                self._checkpoints.save(row)
            if not decision.last:
                self._checkpoints.keep_in_memory(row)
            _report(saved := self._checkpoints.check())
            if decision.last:
                break
        heartbeat.doing(f"finishing after step {progress.step}")
        _report(self._checkpoints.finish())
        self.group.barrier()
        early = self._too_late or (asked_to_stop and progress.step < config.max_steps)
        return Outcome(progress.step, f"asked to stop at step {progress.step}" if early else None, save)

    def _end_here(self, row: dict[str, float], *, saved: bool) -> bool:
        """End at the newest step, with no batch for the next one there yet; returns whether it is saved.

        Args:
            row: the step's metrics.
            saved: whether its save was begun already.
        """
        step = self.state.progress.step
        is_new = step > self.attempt.start_step or self._unsaved
        save = is_new and self._checkpoints.due(step, last=True)
        if save and not saved:
            save = self._in_time(step)
        self.task.end(step, save=save)
        if save and not saved:
            self._checkpoints.save(row)
        return save

    def _saved_before(self, error: RecordRefused, row: dict[str, float], *, saved: bool) -> RecordRefused:
        """Save the newest step, as the next one has a record that ends the run; returns what is to be said.

        Args:
            row: the step's metrics.
            saved: whether its save was begun already.
        """
        step = self.state.progress.step
        if step == self.attempt.start_step and not self._unsaved:
            saved = self.attempt.resume_from is not None
        elif not saved and self._checkpoints.due(step, last=True):
            self._checkpoints.save(row)
            saved = True
        _report(self._checkpoints.finish())
        self.group.barrier()
        where = str(error).removesuffix(f": {error.why}")
        how = f"step {step} is saved, and --ckpt.resume auto goes on from it" if saved else "nothing is saved"
        return RecordRefused(where, f"{error.why} ({how}; --data.unreadable drop leaves such records out)")

    def _train_on(self, batch: RankBatch, step: int) -> dict[str, float]:
        """The step itself; returns its metrics."""
        heartbeat.holds_unsaved(True)
        task = self.task
        prepared = task.prepare(batch)
        row = train_step(
            self.state,
            batch,
            step,
            task.loss,
            self._before_update,
            further_learners=task.learners,
            with_policy=task.trains_policy(step),
            seen=task.seen,
            rewinder=self._rewinder,
        )
        self.state.position = batch.position
        return row | dict(prepared) | batch.metrics

    def _used(self, batch: RankBatch, step: int, row: dict[str, float]) -> dict[str, float]:
        """What the row says of the use of ranks and GPUs; nothing of a step that a spike has broken off."""
        if "rewound_to" in row:
            return {}
        untrained = () if self.task.trains_policy(step) else (POLICY,)
        seconds = row["time/step"] - row.get("time/validation", 0.0)
        ranks = {"busy_ranks": batch.counts.busy_ranks} if self.group.world_size > 1 else {}
        return ranks | self._utilisation.of_step(batch, seconds, untrained)

    def _before_update(self) -> None:
        """Whoever reads the weights off the training thread is done when this returns."""
        self._checkpoints.before_update()
        self.task.before_update()

    def _decide(self, step: int) -> tuple[Decision, bool]:
        """What happens after `step`, and whether somebody asked the run to stop; the same on all ranks."""
        if step == self.config.stop_after and self.group.rank == 0:
            self.run_directory.request_stop(f"--stop-after {step}")
        asked_to_stop, overdue, *flags = self.group.any_of(
            self.run_directory.stop_requested() is not None,
            self._checkpoints.overdue(),
            *self.task.earlier(step),
        )
        earlier = Earlier(*flags)
        if finished := self.task.finished():
            logger.info("the run ends after step %d: %s", step, finished)
        complete = step == self.config.max_steps or finished is not None
        last = complete or earlier.last or (asked_to_stop and not earlier.done)
        save = self._checkpoints.due(step, last=last or overdue)
        if save and earlier.done and not earlier.save:  # then other roles save nothing, or have done so
            save = self._checkpoints.others_saved(step)
        if save and asked_to_stop:
            save = self._in_time(step)
        return Decision(save=save, last=last, again=earlier.done), asked_to_stop

    def _in_time(self, step: int) -> bool:
        """Whether the run, which is asked to stop, has the time to save `step`."""
        self._too_late = not self._checkpoints.in_time(step)
        return not self._too_late


def _times(saves: list[Saved]) -> dict[str, float]:
    """What the row after their commits says of saves: seconds until the commit, and seconds of standstill."""
    if not saves:
        return {}
    return {
        "time/save": max(saved.durable_seconds for saved in saves),
        "time/save_stall": sum(saved.stall_seconds for saved in saves),
    }


def _report(saves: list[Saved]) -> None:
    for saved in saves:
        begun = saved.committed - saved.durable_seconds
        spans.add("saves", "saving", begun, saved.committed, step=saved.step)
        logger.info(
            "step %d saved: durable after %.3f s, of which training stood still for %.3f s",
            saved.step,
            saved.durable_seconds,
            saved.stall_seconds,
        )


def preload(config: TrainerBase) -> None:
    """Import all that training imports, also what it imports late; no memory is taken for weights."""
    folder = Path(config.model.name)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    task_class(config).preload(folder)


T = TypeVar("T")


AHEAD = 2
"""So many batches are made while a step runs on an earlier one."""


class Prefetch(Generic[T]):
    """Makes one thing a step, some steps ahead, in a thread of its own and in the order of steps."""

    def __init__(self, make: Callable[[int], T], first: int, last: int):
        """Begin with step `first`; nothing is made beyond step `last`."""
        self._make = make
        self._last = last
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._next = first
        self._made: deque[Future[T]] = deque()
        self._failed: Exception | None = None
        self._begin(first)

    def get(self, step: int) -> T:
        """What was made for `step`, which is one after the step of the last call; the next ones are begun.

        Raises:
            Exception: what making it raised.
        """
        self._begin(step)
        made = self._made.popleft().result()
        self._begin(step + AHEAD)
        return made

    def _begin(self, through: int) -> None:
        """Have everything made up to step `through`."""
        while self._next <= min(through, self._last):
            self._made.append(self._pool.submit(self._make_next, self._next))
            self._next += 1

    def _make_next(self, step: int) -> T:
        """Make it, unless an earlier one has failed: what comes after that would not be the next."""
        if self._failed:
            raise self._failed
        try:
            return self._make(step)
        except Exception as error:
            self._failed = error
            raise

    def close(self) -> None:
        """End the thread, which may be making something that nobody needs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class OnDemand(Generic[T]):
    """Makes a thing when it is asked for: where it depends on the step before, nothing can be made ahead."""

    def __init__(self, make: Callable[[int], T]):
        self._make = make

    def get(self, step: int) -> T:
        """What is made for `step`."""
        return self._make(step)

    def close(self) -> None:
        """Nothing was begun."""
