"""The process that uploads a run's steps while it trains."""

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from cairn.checkpoint import eval_metrics
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import PINS, CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.kinds import RunConfig
from cairn.launch.jobs.job import JobSlot
from cairn.remote import Objects, RemoteError, RemoteStore
from cairn.remote.client.objects import RETRY_SECONDS
from cairn.remote.prefix_lease import Taken
from cairn.remote.uploads import Limit, RunUploads, Uploader
from cairn.run import heartbeat
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_STOPPED, RoleFailed
from cairn.run.locked_folder import lock
from cairn.run.machine import bytes_of
from cairn.run.messages import Attempt
from cairn.run.output import lines, progress_bars
from cairn.run.processes import ProcessorUse, stop_on_signals
from cairn.run.waiting import Backoff

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two looks for a step to upload."""
MIN_SECONDS = 0.001
"""An upload counts as taking so long at least."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a failed upload is tried again: first, and at most, but never above --ckpt.remote-timeout."""


def uploads_of(config: RunConfig) -> RunUploads | None:
    """What a run uploads; None if it has no remote store."""
    ckpt = config.ckpt
    if ckpt is None or ckpt.remote is None:
        return None
    run = config.run_directory()
    return RunUploads(CheckpointStore(run.checkpoints), ckpt, config.max_steps, run.has_stopped)


def small_files(run: RunDirectory) -> list[Path]:
    """What a machine with an empty disk needs of a run in addition to its steps, and uploads therefore have.

    Ratings are written from evals.jsonl, so that without it those of earlier steps would be lost.
    """
    logs = [run.metrics.path, run.history.path, run.evals.path]
    return [*logs, run.checkpoints / PINS, run.checkpoints / eval_metrics.RATINGS]


def finish_uploads(config: RunConfig, run_id: str) -> None:
    """Upload what a complete run still lacks.

    Raises:
        UsageError: another process is running in the run directory, or the remote prefix is another run's.
        RemoteError: the object store refuses or fails.
    """
    uploads = uploads_of(config)
    if uploads is None:
        return
    run = config.run_directory()
    lock(run)
    try:
        uploader = _uploader(uploads, run, f"{run_id}:done:{secrets.token_hex(8)}")
        uploader.remote.claim(run_id, uploader.owner)
        uploader.begin()
        with progress_bars() as stage:
            while (step := uploader.next_step()) is not None:
                nbytes = uploads.store.manifest(step).nbytes
                uploader.upload(step, stage(f"uploading step {step}", nbytes))
        uploader.end()
    finally:
        run.unlock()


def run_uploader(config: RunConfig, attempt: Attempt, run: RunDirectory) -> int:
    """Upload steps while the run trains, until its last one is there; returns the exit code.

    Errors of the object store are logged, and the upload is tried again, longer and longer later; training
    goes on.
    """
    uploads = uploads_of(config)
    assert uploads is not None, "the launcher starts no uploader for a run without a remote store"
    with stop_on_signals(run):
        return _Loop(_uploader(uploads, run, attempt.owner, attempt), run).run()


def _uploader(uploads: RunUploads, run: RunDirectory, owner: str, attempt: Attempt | None = None) -> Uploader:
    ckpt: CkptConfig = uploads.ckpt
    assert ckpt.remote is not None
    rate = bytes_of(ckpt.remote_bandwidth) if ckpt.remote_bandwidth else None
    # Repeating a request for longer would keep the end of the run waiting beyond its limit.
    objects = Objects(ckpt.remote, retry_seconds=min(RETRY_SECONDS, ckpt.remote_timeout))
    remote, files = RemoteStore(objects, uploads.origin()), small_files(run)
    about = {"run_files": files, "settings": run.config, "limit": Limit(rate)}
    return Uploader(uploads, remote, owner, attempt=attempt, **about)


class _Loop:
    """The uploader's work: what it does next, and what becomes of errors."""

    def __init__(self, uploader: Uploader, run: RunDirectory):
        self.uploader = uploader
        self.uploads = uploader.uploads
        self.run_directory = run
        self._stage = lines(heartbeat.doing, first=0, every=1)
        self._begun = self._compared = False
        self._failing_since: float | None = None
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._said: str | None = None
        self._skipped: set[int] = set()
        """Steps that are damaged here."""

    def run(self) -> int:
        """Work until the run's last step is uploaded."""
        while True:
            last = self.uploads.store.exists(self.uploads.last)  # before the look: nothing comes after it
            try:
                if not self._begun:
                    heartbeat.doing("comparing with the remote store", lengthy=True)
                    self.uploader.begin()
                    self._begun = True
                step = self.uploader.next_step(self._skipped, self._ends_in_time)
                if step is None:
                    if last and self._compared:
                        self.uploader.end()
                        return 0
                    if last:
                        self._compare()
                        continue
                    heartbeat.doing("waiting for a step to upload", waiting=True)
                    time.sleep(LOOK_SECONDS)
                    continue
                self._upload(step)
            except Taken as error:
                self._give_up(str(error))
                return 0
            except (RemoteError, OSError) as error:
                if not self._goes_on_after(error, last):
                    return 0

    def _compare(self) -> None:
        """See once, at the end, whether what was uploaded is still there."""
        for step in self.uploader.gone():
            again = step in self.uploads.store.steps()
            then = "it is uploaded again" if again else "it is not on this disk any more"
            reason = f"somebody has deleted it in {self.uploader.remote} since it was uploaded; {then}"
            logger.warning("step %d: %s", step, reason)
            self.run_directory.history.not_uploaded(step, reason)
        self._compared = True

    def _ends_in_time(self, step: int) -> bool:
        """Whether an upload of the step would end before the run must have ended."""
        left = self.run_directory.seconds_left()
        with contextlib.suppress(CheckpointError):
            expected = self.run_directory.rates.expected("upload", self.uploads.store.manifest(step).nbytes)
            return left is None or expected is None or expected.most <= left
        return False

    def _upload(self, step: int) -> None:
        heartbeat.doing(f"uploading step {step}", lengthy=True)
        began, fresh = time.monotonic(), not self.uploads.sent_file(step).exists()
        use = ProcessorUse(os.getpid())
        try:
            nbytes = self.uploads.store.manifest(step).nbytes
            self.uploader.upload(step, self._stage(f"uploading step {step}", nbytes))
        except (CheckpointError, FileNotFoundError) as error:
            if self.uploads.store.exists(step):  # else retention, or a person, has deleted it meanwhile
                self._skipped.add(step)
                self._say(step, str(error))
            return
        seconds = time.monotonic() - began
        logger.info("step %d was uploaded in %.1f s", step, seconds)
        if fresh:
            # When the run must end soon, training will not keep this process waiting for processors.
            self.run_directory.rates.note("upload", nbytes, max(seconds - use.longest_wait(), MIN_SECONDS))
        self._failing_since, self._said = None, None
        self._backoff.reset()

    def _goes_on_after(self, error: Exception, last: bool) -> bool:
        """Wait before the next try; False if the run is over and nothing was uploaded for too long."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._say(self.uploads.store.latest() or 0, str(error))
        limit = self.uploads.ckpt.remote_timeout
        if last and now - self._failing_since > limit:
            self._give_up(
                f"nothing could be uploaded for {limit:g} s (--ckpt.remote-timeout allows more): {error}"
            )
            return False
        heartbeat.doing(f"waiting for the remote store: {error}", waiting=True)
        self._backoff.grow()
        time.sleep(min(self._backoff.seconds, limit))
        return True

    def _say(self, step: int, reason: str) -> None:
        """Log an error and show it to the user, once as long as it is the same."""
        logger.warning("step %d is not uploaded: %s", step, reason)
        if reason != self._said:
            self.run_directory.history.not_uploaded(step, reason)
        self._said = reason

    def _give_up(self, reason: str) -> None:
        logger.error("nothing more is uploaded: %s", reason)
        self.uploads.give_up(reason)
        self.run_directory.history.not_uploaded(self.uploads.store.latest() or 0, reason)


class UploaderSlot(JobSlot):
    """Keeps a process at work that uploads steps (`run_uploader`)."""

    def __init__(self, run: RunDirectory, config: RunConfig, uploads: RunUploads):
        super().__init__("uploader", run, config, uploads)
        self.uploads = uploads

    @classmethod
    def of(cls, run: RunDirectory, config: RunConfig, _attempt: Attempt) -> "UploaderSlot | None":
        """The slot, if the run has a remote store."""
        uploads = uploads_of(config)
        return None if uploads is None else cls(run, config, uploads)

    def first_missing(self) -> int:
        return self.store.latest() or 0

    def still_wanted(self) -> bool:
        """Whether the newest saved step is not uploaded yet: it alone is worth a stopped run's time."""
        newest = self.store.latest()
        return newest in self.uploads.waiting()

    def conclude(self, code: int) -> int:
        remote, missing, noted = self.uploads.ckpt.remote, self.uploads.missing(), self.uploads.read()
        newest = max(noted.steps, default=None)
        there = f"{remote} has step {newest}" if newest else f"{remote} has no step"
        if not missing:
            print(there, flush=True)
            return code
        steps = ", ".join(map(str, missing))
        reason = f" ({noted.given_up})" if noted.given_up else ""
        if code == EXIT_STOPPED or self.interrupted:
            print(f"{there}; not uploaded yet: {steps}{reason}; a resumed run goes on with that", flush=True)
            return EXIT_STOPPED
        raise RoleFailed(
            f"the run is complete, but {there}; not uploaded: {steps}{reason}, see {self.log}; "
            "--ckpt.resume auto tries again"
        )
