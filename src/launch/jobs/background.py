"""The background jobs of a run, by its settings: uploads and exports of its steps."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.step_jobs import StepJobs
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.launch.jobs.export import ExporterSlot, finish_exports, run_exporter
from cairn.launch.jobs.job import JobSlot
from cairn.launch.jobs.upload import UploaderSlot, finish_uploads, run_uploader
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class JobKind:
    """A kind of background job.

    slot: its slot, with a process at work; None if the settings ask for no such job. run: what that process
    does; returns the exit code. finish: does what a complete run still lacks; takes the run's id.
    """

    slot: Callable[[RunDirectory, RunConfig, Attempt], JobSlot | None]
    run: Callable[[RunConfig, Attempt, RunDirectory], int]
    finish: Callable[[RunConfig, str], None]


JOBS: Mapping[str, JobKind] = {
    "uploader": JobKind(UploaderSlot.of, run_uploader, finish_uploads),
    "exporter": JobKind(ExporterSlot.of, run_exporter, finish_exports),
}
"""By the name of the process in roles.json."""


class BackgroundJobs:
    """All background jobs of a run, in their slots."""

    def __init__(self, config: RunConfig, slots: Sequence[JobSlot]):
        self.config = config
        self.slots = slots

    def look_after(self, step: int, *, stopping: bool) -> None:
        """`JobSlot.look_after` for each job."""
        for slot in self.slots:
            slot.look_after(step, stopping=stopping)

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Wait until all is done or given up, once the run's last step is saved; then apply retention.

        Args:
            update: called repeatedly, to show what is being done.
            interrupted: whether nobody wants to wait any longer.
        """
        for slot in self.slots:
            slot.await_it()
        while working := [slot for slot in self.slots if not slot.ended]:
            if interrupted():
                for slot in working:
                    slot.interrupted = True
                return
            self.look_after(self.config.max_steps, stopping=False)
            update()
            time.sleep(POLL_SECONDS)
        if (ckpt := self.config.ckpt) and (self.slots or ckpt.rated_by):
            spared = StepJobs([slot.job for slot in self.slots]).spared
            apply_retention(CheckpointStore(self.config.run_directory().checkpoints), ckpt, spared)

    def finish_stopped(
        self, step: int, seconds: float, update: Callable[[], None], interrupted: Callable[[], bool]
    ) -> None:
        """Wait, but only for so long, for what a run that was stopped after `step` should not lose."""
        end = time.monotonic() + seconds
        while any(not slot.ended and slot.still_wanted() for slot in self.slots):
            if interrupted() or time.monotonic() > end:
                return
            self.look_after(step, stopping=True)
            update()
            time.sleep(POLL_SECONDS)

    def conclude(self, code: int) -> int:
        """Say how each job ended; returns the launcher's exit code (`JobSlot.conclude`)."""
        for slot in self.slots:
            code = slot.conclude(code)
        return code


@contextlib.contextmanager
def background_jobs(run: RunDirectory, config: RunConfig, attempt: Attempt) -> Generator[BackgroundJobs]:
    """The jobs, at work as long as the block lasts."""
    slots: list[JobSlot] = []
    try:
        for kind in JOBS.values():
            if slot := kind.slot(run, config, attempt):
                slots.append(slot)
        yield BackgroundJobs(config, slots)
    finally:
        for slot in slots:
            slot.stop()
