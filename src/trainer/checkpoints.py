"""Saving a trainer's state while training goes on."""

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Origin
from cairn.checkpoint.memory.memory_slots import MemoryRecord, record_of
from cairn.checkpoint.memory.memory_steps import MemorySteps
from cairn.checkpoint.retention import Spare, apply_retention
from cairn.checkpoint.saving.arena import SaveFailed
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.saving.saver import Newest, Saved, SaveOptions, Saver, SavingRank, decide
from cairn.checkpoint.step_folder import TRAINER_STATE, TrainerRecord
from cairn.checkpoint.step_jobs import StepJob, StepJobs
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.reader import DTYPE_NAMES
from cairn.config.ckpt import CkptConfig
from cairn.formats.transfer.export_folder import run_exports
from cairn.remote.uploads import RunUploads
from cairn.run import heartbeat
from cairn.run.directory import RunDirectory
from cairn.run.history import spared_for_rewinds, to_json
from cairn.run.machine import available_memory, bytes_of
from cairn.run.waiting import Span
from cairn.trainer.models.model import companions
from cairn.trainer.state import Context

logger = logging.getLogger(__name__)

STAGING_SHARE = 0.8
"""Part of a host's available memory that copies of its ranks' states may take."""
PACKED = ("trainer",)
"""Folders of a step whose tensors `ckpt.compress` compresses; model/ must open in other programs."""
PACKAGES = ("cairn", "torch", "transformers", "ray", "safetensors")


class Checkpoints:
    """What the training loop asks for when it comes to saving; all ranks ask together.

    This class itself is for a run that saves nothing.
    """

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after `step`; `last` if it must be saved in any case."""
        return False

    def overdue(self) -> bool:
        """Whether the last save was too long ago, by this rank's clock."""
        return False

    def others_saved(self, step: int) -> bool:
        """Whether the parts of the other roles for checkpoint `step` are there; the same on all ranks."""
        return False

    def in_time(self, step: int) -> bool:
        """Whether a run that is asked to stop has the time to save `step`; the same on all ranks."""
        return True

    def prepare(self) -> None:
        """Allocate what saving needs ahead of the first save; once the optimiser has its state."""

    def before_update(self) -> None:
        """Return once the weights and the optimiser's state have been copied."""

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save the current step, whose metrics these are."""
        raise AssertionError("a run without checkpoints saves nothing")

    def keep_in_memory(self, metrics: Mapping[str, float]) -> None:
        """Copy the current step, whose metrics these are, into memory outside this process, if it is due.

        Call it after `save`, if the step becomes a checkpoint.
        """

    def wait(self) -> None:
        """Wait for the save in progress; `check` returns it.

        Raises:
            CheckpointError: it failed.
        """

    def metrics(self) -> Mapping[str, float]:
        """What a step's row says of the checkpoints; known to rank 0 only."""
        return {}

    def check(self) -> list[Saved]:
        """The saves completed since the last call.

        Raises:
            CheckpointError: a save has failed.
        """
        return []

    def finish(self) -> list[Saved]:
        """Wait for the last save, and end; the saves completed since the last `check`."""
        return []

    def abandon(self) -> None:
        """End, and give up a save that is under way."""


def make_checkpoints(
    context: Context, parent: Origin | None, others: tuple[str, ...], after_commit: Callable[[int], None]
) -> Checkpoints:
    """What saves the run's checkpoints; all ranks call it.

    Args:
        parent: the checkpoint that the run goes on from.
        others: the parts of each checkpoint that other roles write.
        after_commit: called on rank 0 with the step of each checkpoint, once it is there.
    """
    ckpt = context.state.config.ckpt
    return TrainerCheckpoints(context, ckpt, parent, others, after_commit) if ckpt else Checkpoints()


def host_share(wanted: int, ranks: Sequence[tuple[int, int]]) -> int:
    """The bytes that one rank of a host may take, of the `wanted`.

    Args:
        ranks: of each rank of the host, the bytes that it needs, and those that it found available.
    """
    needed, available = sum(rank[0] for rank in ranks), min(rank[1] for rank in ranks)
    usable = int(STAGING_SHARE * available)
    return wanted if needed <= usable else usable * wanted // needed


class OtherWriters:
    """Notices that a rank or a role has died whose part of a save will never come, by what the driver and the
    launcher say of it."""

    def __init__(self, run: RunDirectory, world_size: int):
        self._run = run
        self._ranks = [f"trainer_rank{rank}" for rank in range(world_size)] if world_size > 1 else []
        self._looked = -math.inf

    def check(self, part: str) -> None:
        """Look once a second at most.

        Args:
            part: a role's name if the part that it writes is waited for. A role that died is started again,
                and then writes its part, but not once the run was asked to stop: the launcher, which knows
                this, ends a run in which a rank waits for such a role.

        Raises:
            SaveFailed: a rank has died.
        """
        now = time.monotonic()
        if now - self._looked < 1:
            return
        self._looked = now
        roles = self._run.current_roles() or {}
        dead = {name for name, role in roles.items() if role.state == "failed"}
        if lost := sorted(dead.intersection(self._ranks)):
            raise SaveFailed(f"{lost[0]} has died before its part was written")
        if part in dead and self._run.stop_requested():
            heartbeat.doing(f"waiting for the part of {part}", waiting=True)


class TrainerCheckpoints(Checkpoints):
    """Saves a trainer's state, off the training loop's critical path."""

    def __init__(
        self,
        context: Context,
        ckpt: CkptConfig,
        parent: Origin | None,
        others: tuple[str, ...],
        after_commit: Callable[[int], None],
    ):
        """Prepare to save; see `make_checkpoints`.

        The run's metrics are durable before a checkpoint of their step exists.
        """
        self.state = state = context.state
        self.store = CheckpointStore(context.run.checkpoints)
        self.attempt = context.attempt
        self.parent = parent
        self.recipe = context.recipe
        self._ckpt = ckpt
        self._others = others if ckpt.training_state else ()
        self._parts = ["trainer", *self._others] if ckpt.training_state else ["model"]
        group = state.group
        self._fixed: Mapping[str, bytes] = {}
        """The small files that all steps have alike, by name within the step; on rank 0."""
        if group.rank == 0:
            policy = state.policy
            beside = {**companions(policy.module, context.model_folder), **policy.beside()}
            self._fixed = {f"model/{name}": content for name, content in beside.items()}
        self._saved_at = time.monotonic()
        jobs = _jobs_of(context, ckpt, self.store)
        self._jobs = jobs

        def before_commit() -> None:
            context.run.metrics.make_durable()
            now = context.run.attempt()
            if now and now.token and self.attempt.token and now.token != self.attempt.token:
                raise SaveFailed(
                    f"attempt {now.number} of the run has begun in {context.run.path}, so attempt "
                    f"{self.attempt.number} commits nothing there any more"
                )

        def committed(step: int) -> None:
            after_commit(step)
            apply_retention(self.store, ckpt, jobs.spared)

        self._times = SaveTimes(context.run, self.store, ckpt, state.config.max_steps)
        rank = SavingRank(group.rank, group.world_size, group.gather_objects(secrets.token_hex(8))[0])
        resumed = Path(context.attempt.resume_from) if context.attempt.resume_from else None
        if record := record_of(resumed) if resumed else None:
            resumed = self.store.folder(parent.step) if parent else None
        self._promised = record.saves if record else 0
        """The newest step of which it was decided that it becomes a checkpoint; 0: none yet."""
        owed = group.rank == 0 and self._promised > 0 and not self.store.exists(self._promised)
        self._owed = group.any_of(owed)[0]
        """Whether that step was not saved, because a rank has died: then the next one is."""
        self._memory: MemorySteps | None = None
        if ckpt.memory_interval is not None and context.host is not None:
            self._memory = MemorySteps(
                context.run.memory,
                rank,
                context.host,
                group.gather_objects,
                lambda: int(STAGING_SHARE * available_memory()),
                self._fixed,
                state.progress.step,
            )
        self._saver = Saver(
            self.store,
            rank,
            roles={part: self.attempt.id for part in self._others},
            how=SaveOptions(
                part_timeout=ckpt.part_timeout,
                read_back=ckpt.verify == "save",
                room=self._staging_memory,
                packed=PACKED if ckpt.compress else (),
                constant=self._constant(),
                carried=state.policy.carried() if group.rank == 0 else {},
                parent=resumed,
            ),
            before_commit=before_commit,
            after_commit=committed,
            while_waiting=OtherWriters(context.run, group.world_size).check,
        )

    def due(self, step: int, *, last: bool) -> bool:
        interval = self._ckpt.interval
        return last or self._owed or (interval is not None and step % interval == 0)

    def overdue(self) -> bool:
        minutes = self._ckpt.interval_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def others_saved(self, step: int) -> bool:
        here = all(self.store.has_part(step, part, self.attempt.id) for part in self._others)
        return not self.state.group.any_of(not here)[0]

    def in_time(self, step: int) -> bool:
        group = self.state.group
        late = group.rank == 0 and not self._times.allow(step, saving=self._saver.saving)
        return not group.any_of(late)[0]

    def prepare(self) -> None:
        if self._ckpt.interval or self._ckpt.interval_minutes:
            self._saver.prepare(self._tensors())
        if self._memory is not None:
            self._memory.prepare(self._tensors())

    def before_update(self) -> None:
        self._saver.before_update()
        if self._memory is not None:
            self._memory.before_update()

    def metrics(self) -> Mapping[str, float]:
        return {**self._jobs.metrics(), **(self._memory.metrics() if self._memory else {})}

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save the current step, whose metrics these are; unless `save_async`, wait for the commit."""
        step = self.state.progress.step
        tensors = self._tensors()
        self._saver.save(step, tensors, {**self._fixed, **self._files()}, self._about(metrics, tensors))
        self._promised, self._owed = step, False
        self.parent = Origin(run_id=self.attempt.run_id, step=step)
        if not self._ckpt.save_async:
            self._saver.finish()
        self._saved_at = time.monotonic()

    def keep_in_memory(self, metrics: Mapping[str, float]) -> None:
        step, every = self.state.progress.step, self._ckpt.memory_interval
        if self._memory is None or every is None or step % every:
            return
        tensors = self._tensors()
        record = self._record(metrics, tensors) if self.state.group.rank == 0 else None
        self._memory.keep(step, tensors, record)

    def _record(self, metrics: Mapping[str, float], tensors: Tensors) -> MemoryRecord:
        """What is to be known of the current step in memory, as the next step may change it."""
        parent = self.parent.model_dump() if self.parent else None
        return MemoryRecord(
            attempt=self.attempt.id,
            session=self._saver.session,
            step=self.state.progress.step,
            saves=self._promised,
            about={**self._about(metrics, tensors), "parent": parent},
            files={name: base64.b64encode(data).decode() for name, data in self._files().items()},
            linked={name: str(file.source) for name, file in self._saver.how.carried.items()},
        )

    def _files(self) -> dict[str, bytes]:
        """The small files that each step has of its own, by name within it."""
        state = self.state
        files: dict[str, bytes] = {}
        if self._ckpt.training_state:
            record = TrainerRecord(
                progress=asdict(state.progress),
                seed=state.config.seed,
                rows=state.scorer.rows.name,
                optimizer=type(state.policy.optimizer).__name__,
                scheduler=state.config.scheduler.model_dump(),
                recipe=dict(self.recipe),
                spikes=state.spikes.saved(),
                position=state.position,
                validation=state.validation or None,
                rewinds=to_json(state.rewinds) or None,
            )
            files[TRAINER_STATE] = record.to_json()
            for model in state.models.values():
                if model is not state.policy:
                    where = model.weights_stem.rpartition("/")[0]
                    files |= {f"{where}/{name}": content for name, content in model.beside().items()}
        return files

    def wait(self) -> None:
        self._saver.finish()
        if self._memory is not None:
            self._memory.wait()

    def check(self) -> list[Saved]:
        saved = self._saver.check()
        if self.state.group.rank == 0:
            self._times.note(saved)
        return saved

    def finish(self) -> list[Saved]:
        self._saver.finish()
        saved = self.check()
        self._saver.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return saved

    def abandon(self) -> None:
        self._saver.abandon()
        if self._memory is not None:
            self._memory.abandon()

    def _staging_memory(self, wanted: int) -> int:
        """How many bytes of host memory this rank's copy of its state may have, of the `wanted`.

        The ranks of a host share what is available there; all ranks call this together.
        """
        if self._ckpt.staging_memory:
            return bytes_of(self._ckpt.staging_memory)
        host = socket.gethostname()
        ranks = self.state.group.gather_objects((host, wanted, available_memory()))
        room = host_share(wanted, [(needed, available) for name, needed, available in ranks if name == host])
        if room < wanted:
            logger.warning(
                "the state to save takes %.1f GB of this rank, and %s has room for %.1f GB: it is saved in "
                "pieces, for which training waits; more host memory, or more hosts, avoid that",
                wanted / 1e9,
                host,
                room / 1e9,
            )
        return room

    def _constant(self) -> dict[str, Collection[str]]:
        """The tensors that are the same in all steps and need not be written each time, by stem."""
        if not self._ckpt.incremental:
            return {}
        models = self.state.models.values() if self._ckpt.training_state else [self.state.policy]
        constant = {model.weights_stem: names for model in models if (names := model.constant())}
        if not constant:
            logger.warning("ckpt.incremental saves nothing here: all weights are trained; see --freeze")
        return constant

    def _tensors(self) -> Tensors:
        return self.state.tensors(weights_only=not self._ckpt.training_state)

    @functools.cached_property
    def _of_run(self) -> dict[str, Any]:
        """What all manifests of this process say alike."""
        recipe = json.dumps({key: self.recipe[key] for key in sorted(self.recipe.keys() - {"changes"})})
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        return {
            "versions": versions | {"python": platform.python_version()},
            "config_digest": hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest(),
        }

    def _about(self, metrics: Mapping[str, float], tensors: Tensors) -> dict[str, Any]:
        return {
            **self._of_run,
            "run_id": self.attempt.run_id,
            "attempt": self.attempt.number,
            "branch": self.attempt.branch,
            "parts": self._parts,
            "parent": self.parent,
            "world_size": self.state.group.world_size,
            "dtypes": {
                stem: "+".join(sorted({DTYPE_NAMES[tensor.dtype] for tensor in named.values()}))
                for stem, named in tensors.items()
            },
            "metrics": metrics,
        }


def _jobs_of(context: Context, ckpt: CkptConfig, store: CheckpointStore) -> StepJobs:
    """What needs steps that no rule keeps: exports, uploads, and the guard against spikes."""
    config, jobs, others = context.state.config, list[StepJob](), list[Spare]()
    if ckpt.export is not None:
        jobs.append(run_exports(ckpt.export, store, last=config.max_steps, attempt=context.attempt.id))
    if ckpt.remote is not None:
        jobs.append(RunUploads(store, ckpt, config.max_steps))
    if config.spike.on_spike == "rewind" and (interval := ckpt.interval):
        others.append(lambda unkept: spared_for_rewinds(unkept, store.latest() or 0, interval))
    return StepJobs(jobs, others, context.run.history)


class SaveTimes:
    """Of one run, as rank 0 sees them.

    Args:
        last: the run's last step.
    """

    def __init__(self, run: RunDirectory, store: CheckpointStore, ckpt: CkptConfig, last: int):
        self.run = run
        self.store = store
        self._uploads = RunUploads(store, ckpt, last) if ckpt.remote else None

    def note(self, saves: Iterable[Saved]) -> None:
        """Note how long these saves took, from their beginning to their commit."""
        for saved in saves:
            self.run.rates.note("save", self._nbytes(saved.step), saved.durable_seconds)

    def allow(self, step: int, *, saving: bool) -> bool:
        """Whether `step` is still to be saved; logged and noted in the history if there is a deadline.

        Args:
            saving: whether an earlier save is in progress, which has to end first.
        """
        left = self.run.seconds_left()
        if left is None:
            return True
        remote = self._uploads.read() if self._uploads else None
        if remote is not None and remote.given_up is not None:
            remote = None
        committed = self.store.latest()
        nbytes = self._nbytes(committed) if committed else 0
        save = self.run.rates.expected("save", nbytes)
        if save and saving:
            save = Span(save.least, 2 * save.most)
        newest, upload = None, self.run.rates.expected("upload", nbytes)
        if committed:
            waits = remote is not None and committed not in remote.steps
            newest = Newest(committed, waits, upload)
            if upload and remote and remote.uploading:  # which has to end first
                upload = Span(upload.least, 2 * upload.most)
        decision = decide(step, left, save, upload, newest, remote=remote is not None)
        logger.info("step %d: %s", step, decision.reason)
        self.run.history.last_save(step, decision.reason, saves=decision.saves)
        return decision.saves

    def _nbytes(self, step: int) -> int:
        """The bytes of a saved step; 0 if it was deleted meanwhile."""
        with contextlib.suppress(CheckpointError):
            return self.store.manifest(step).nbytes
        return 0
