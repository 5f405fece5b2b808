"""The work beside a run, by its settings: exports and uploads of its steps."""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence

from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.step_jobs import StepJobs
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.launch.jobs.export import ExporterPlace, exports_of
from cairn.launch.jobs.job import BackgroundPlace
from cairn.launch.jobs.upload import UploaderPlace, uploads_of
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt

POLL_SECONDS = 0.05


class Beside:
    """All the work beside a run."""

    def __init__(self, config: RunConfig, places: Sequence[BackgroundPlace]):
        self.config = config
        self.places = places

    @property
    def jobs(self) -> StepJobs:
        """What is done, as retention asks it."""
        return StepJobs([place.job for place in self.places])

    def look_after(self, step: int, *, stopping: bool) -> None:
        """See `BackgroundPlace.look_after`."""
        for place in self.places:
            place.look_after(step, stopping=stopping)

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Wait until all is done or given up, once the run's last step is saved; then apply retention.

        Args:
            update: called repeatedly, to show what is being done.
            interrupted: whether nobody wants to wait any longer.
        """
        for place in self.places:
            place.await_it()
        while working := [place for place in self.places if not place.ended]:
            if interrupted():
                for place in working:
                    place.interrupted = True
                return
            self.look_after(self.config.max_steps, stopping=False)
            update()
            time.sleep(POLL_SECONDS)
        if (ckpt := self.config.ckpt) and (self.places or ckpt.rated_by):
            apply_retention(CheckpointStore(self.config.run_directory().checkpoints), ckpt, self.jobs.spared)

    def finish_stopped(
        self, step: int, seconds: float, update: Callable[[], None], interrupted: Callable[[], bool]
    ) -> None:
        """Wait, but only for so long, for what a run that was stopped after `step` should not lose."""
        end = time.monotonic() + seconds
        while any(not place.ended and place.still_wanted() for place in self.places):
            if interrupted() or time.monotonic() > end:
                return
            self.look_after(step, stopping=True)
            update()
            time.sleep(POLL_SECONDS)

    def conclude(self, code: int) -> int:
        """Say how all of it ended; see `BackgroundPlace.conclude`."""
        for place in self.places:
            code = place.conclude(code)
        return code

    def stop(self) -> None:
        """Kill the processes."""
        for place in self.places:
            place.stop()


@contextlib.contextmanager
def work_beside(run: RunDirectory, config: RunConfig, attempt: Attempt) -> Generator[Beside]:
    """All of it, at work as long as the block lasts."""
    places: list[BackgroundPlace] = []
    beside = Beside(config, places)
    try:
        if (uploads := uploads_of(config)) is not None:
            places.append(UploaderPlace(run, config, uploads))
        if (made := exports_of(config, attempt.id)) is not None:
            places.append(ExporterPlace(run, config, made))
        yield beside
    finally:
        beside.stop()
