"""Exports of a run's steps: what is checked before the run starts, and the process that makes them."""

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.formats import EXPORTERS
from cairn.formats.transfer.export_folder import RunExports, refuse_options, run_exports
from cairn.launch.jobs.job import JobSlot
from cairn.launch.start import Start
from cairn.run import heartbeat
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import EXIT_STOPPED, RoleFailed
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt
from cairn.run.output import Stage, importing, lines, progress_bars
from cairn.run.processes import stop_on_signals

logger = logging.getLogger(__name__)

FOLDER = "exports"
"""Name of the folder of exports in the run directory, unless another is given."""
LOOK_SECONDS = 0.5
"""Between two looks for a step to export."""
RETRY_SECONDS = 30.0
"""Until a step is tried again that the system did not let through, unless the run's last step is saved."""


# Before a run starts


def with_exports(config: RunConfig) -> RunConfig:
    """The configuration with the folder of exports settled, if there are to be any; all of it is checked.

    Raises:
        UsageError: no such format is written, or the folder belongs to the checkpoints.
    """
    ckpt = config.ckpt
    if ckpt is None or ckpt.export is None:
        return config
    if ckpt.export.format not in EXPORTERS:
        raise UsageError(
            f"--ckpt.export.format {ckpt.export.format}: Cairn writes {', '.join(sorted(EXPORTERS))}"
        )
    run = config.run_directory()
    folder = Path(os.path.abspath(ckpt.export.folder or run.path / FOLDER))
    checkpoints = run.checkpoints.resolve()
    if checkpoints in (folder.resolve(), *folder.resolve().parents):
        raise UsageError(
            f"--ckpt.export.folder {folder}: lies in {run.checkpoints}, the folder of the run's checkpoints; "
            "give another one"
        )
    export = ckpt.export.model_copy(update={"folder": str(folder)})
    settled = config.sharing(ckpt=ckpt.model_copy(update={"export": export}))
    exports = run_exports(export, CheckpointStore(run.checkpoints), last=config.max_steps, attempt="").exports
    try:
        refuse_options(exports.name, exports.options)
    except UsageError as error:
        raise UsageError(f"--ckpt.export.quantize {export.quantize}: {error}") from None
    return settled


def exports_of(config: RunConfig, attempt: str) -> RunExports | None:
    """The exports of a run, whose settings `with_exports` has settled; None if it makes none.

    Args:
        attempt: id of the attempt.
    """
    export = config.ckpt.export if config.ckpt else None
    if export is None:
        return None
    store = CheckpointStore(config.run_directory().checkpoints)
    return run_exports(export, store, last=config.max_steps, attempt=attempt)


def refuse_conflicts(config: RunConfig, start: Start) -> None:
    """Check that nothing in the folder of exports is in the way of those of a run that begins at `start`.

    Raises:
        UsageError: something is; the message names it.
    """
    made = exports_of(config, "")
    if made is None:
        return
    of_run = start.manifest.run_id if start.manifest and not start.is_fork else "this one"
    if conflicts := made.exports.conflicts(of_run):
        more = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
        raise UsageError(
            f"--ckpt.export.folder {made.exports.folder}: {conflicts[0]}{more}; give another folder, or move "
            "that away"
        )


def exports_in_words(config: RunConfig) -> str | None:
    """What is exported, for people; None if nothing is."""
    export = config.ckpt.export if config.ckpt else None
    if export is None:
        return None
    which = f"every {export.interval} steps" if export.interval else "every saved step"
    dtype = "".join(f", {wanted}" for wanted in (export.dtype, export.quantize) if wanted)
    return f"exports {which} as {export.format}{dtype} to {export.folder}"


def set_exports_aside(config: RunConfig, start: Start, name: str) -> None:
    """Move exports of the steps that the run goes back behind to `abandoned/<name>` in their folder."""
    made = exports_of(config, "")
    if made is None:
        return
    with made.exports.alone():
        aside = made.exports.set_aside_after(0 if start.is_fork else start.step, name)
    if aside:
        print(f"the exports after step {start.step} are now in {aside}", flush=True)


def finish_exports(config: RunConfig, _run_id: str) -> None:
    """Export what a complete run still lacks.

    Raises:
        UsageError: another process is running in the run directory.
        RoleFailed: something could not be exported.
    """
    made = exports_of(config, secrets.token_hex(4))
    run = config.run_directory()
    if made is None or not made.missing():
        return
    lock(run)
    try:
        print(f"the run is complete, but its exports are not: {made.exports.folder} is finished", flush=True)
        exporter = Exporter(made, verify=_verifies(config), missed=run.history.not_exported)
        with progress_bars() as stage:
            while exporter.export_next(stage):
                pass
        if config.ckpt and config.ckpt.remote is None:  # or steps may still wait to be uploaded
            apply_retention(made.store, config.ckpt, made.spared)
    finally:
        run.unlock()
    if missing := what_is_missing(made):
        raise RoleFailed(f"the run is complete, but not all of it could be exported: {missing}")


def what_is_missing(made: RunExports) -> str | None:
    """Which steps in the store are not exported although they should be, and why, in words."""
    missing = made.missing()
    if not missing:
        return None
    failures = made.exports.failures(made.attempt)
    failed = {int(step): failure.reason for step, failure in failures.steps.items()}
    rest = failures.given_up or "not begun"
    return "; ".join(f"step {step}: {failed.get(step, rest)}" for step in missing)


# The process


class Exporter:
    """Exports a run's steps, one at a time.

    Args:
        missed: called with the step and the reason whenever an export fails.
    """

    def __init__(
        self,
        made: RunExports,
        *,
        verify: bool,
        missed: Callable[[int, str], None],
    ):
        self.made = made
        self.store = made.store
        self.verify = verify
        self.missed = missed
        self._retry: dict[int, float] = {}
        """When to try a step again that has failed (`time.monotonic`)."""

    def export_next(self, stage: Stage, *, last: bool = True) -> bool:
        """Export the oldest step that waits; returns whether there was one.

        Args:
            last: no further step will come, so that those which failed are tried again at once.
        """
        now = time.monotonic()
        waiting = self.made.waiting()
        step = next((step for step in waiting if last or now >= self._retry.get(step, now)), None)
        if step is None:
            return False
        heartbeat.doing(f"exporting step {step}", lengthy=True)
        with importing():
            from cairn.formats.transfer.export_step import (
                export_into,  # imports torch, which no run waits for
            )

        exports, folder = self.made.exports, self.store.folder(step)
        try:
            with exports.alone():
                if not exports.is_done(folder):
                    found = export_into(
                        exports,
                        folder,
                        check=self.verify,
                        stage=lambda name, total: stage(f"exporting step {step}: {name}", total),
                    )
                    seconds = time.monotonic() - now
                    logger.info("step %d is exported after %.1f s: %s", step, seconds, found)
                exports.trim(self.made.keep)
        except Exception as error:  # formats are many, and none of them may end a run
            self._note(step, error)
        return True

    def _note(self, step: int, error: Exception) -> None:
        if not self.store.exists(step):
            logger.warning("step %d was deleted while it was exported", step)
            return
        if not isinstance(error, CairnError | OSError):
            logger.error("exporting step %d failed", step, exc_info=error)
        reason = str(error) or type(error).__name__
        for_good = not isinstance(error, OSError)
        failure = self.made.exports.note_failure(self.made.attempt, step, reason, for_good=for_good)
        self._retry[step] = time.monotonic() + RETRY_SECONDS
        logger.warning("step %d is not exported (attempt %d): %s", step, failure.tries, reason)
        self.missed(step, reason)


def run_exporter(config: RunConfig, attempt: Attempt, run: RunDirectory) -> int:
    """Export steps while the run trains, until its last one is exported; returns the exit code."""
    made = exports_of(config, attempt.id)
    assert made is not None, "the launcher starts no exporter for a run without exports"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    exporter = Exporter(made, verify=_verifies(config), missed=run.history.not_exported)
    idle = False
    with stop_on_signals(run):
        while True:
            last = made.store.exists(made.last)  # before the look for work: then nothing comes after it
            if exporter.export_next(lines(heartbeat.doing, first=0, every=1), last=last):
                idle = False
                continue
            if last:
                return 0
            if not idle:
                heartbeat.doing("waiting for a step to export", waiting=True)
                idle = True
            time.sleep(LOOK_SECONDS)


def _verifies(config: RunConfig) -> bool:
    return bool(config.ckpt and config.ckpt.export and config.ckpt.export.verify)


class ExporterSlot(JobSlot):
    """Keeps a process at work that exports steps (`run_exporter`)."""

    def __init__(self, run: RunDirectory, config: RunConfig, made: RunExports):
        super().__init__("exporter", run, config, made)
        self.made = made

    @classmethod
    def of(cls, run: RunDirectory, config: RunConfig, attempt: Attempt) -> "ExporterSlot | None":
        """The slot, if the run makes exports."""
        made = exports_of(config, attempt.id)
        return None if made is None else cls(run, config, made)

    def first_missing(self) -> int:
        return min(self.made.missing(), default=self.made.last)

    def conclude(self, code: int) -> int:
        exports = self.made.exports
        if gone := self._gone():
            print(
                f"warning: never exported, since retention deleted it first: {_steps(gone)}; a larger "
                "--ckpt.export.max-waiting keeps more of what waits",
                flush=True,
            )
        if code == EXIT_STOPPED:
            if waiting := self.made.waiting():
                print(f"not exported yet: {_steps(waiting)}; a resumed run goes on with that", flush=True)
            return code
        missing = what_is_missing(self.made)
        if missing and self.interrupted:
            print(
                f"stopped before all was exported to {exports.folder}: {missing}; --ckpt.resume auto goes on",
                flush=True,
            )
            return EXIT_STOPPED
        if missing:
            raise RoleFailed(
                f"the run is complete, but {exports.folder} is not: {missing}; --ckpt.resume auto tries again"
            )
        print(f"exported to {exports.folder}", flush=True)
        return code

    def _gone(self) -> list[int]:
        """The steps that failed in this attempt, by history.jsonl, and can't be exported any more."""
        failed: set[int] = set()
        for event in self.run.history.rows():
            if event["event"] == "attempt":
                failed = set()
            elif event["event"] == "not_exported":
                failed.add(event["step"])
        there = {step for step in failed if self.made.exports.folder_of(step).exists()}
        newest = self.store.latest() or 0
        return sorted(step for step in failed - there - set(self.store.steps()) if step < newest)


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
