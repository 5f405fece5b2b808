"""Runs the roles of an attempt, each in its own process and session, until the run ends."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cairn.config.kinds import KINDS
from cairn.launch.display import StepDisplay
from cairn.launch.exit_report import (
    RANK_DIED,
    conclude,
    conclude_early,
    say_findings,
    say_what_failed,
    shorter,
    why_unsaved,
)
from cairn.launch.jobs.background import background_jobs
from cairn.launch.plan.run_plan import RunPlan
from cairn.launch.preemption import Notice, watching
from cairn.launch.ray.environment import remove_private_folders
from cairn.launch.supervise.role import OWN_WORKERS, RoleSlot
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_LOST, EXIT_STOPPED, WORKING, RoleFailed
from cairn.run.files import read_note
from cairn.run.heartbeat import Beat
from cairn.run.messages import Attempt
from cairn.run.output import json_line, outlive_terminal
from cairn.run.processes import stop_on_signals
from cairn.run.signals import say


def run_roles(run: RunDirectory, plan: RunPlan, attempt: Attempt) -> int:
    """Start the roles of the plan, restart those that die, stop the rest at the end; returns the exit code.

    Once the run was asked to stop, no role is started any more; the living roles save as much as they can.

    Args:
        run: the directory that this process has locked: another object of the path knows nothing of the lock.

    Raises:
        RoleFailed: a role failed for good; the run directory was moved, removed or replaced; or the run is
            complete, but its exports or uploads are not.
        StartDamaged: the checkpoint that the trainer must resume from is damaged.
        KeyboardInterrupt: the user asked to stop a second time.
    """
    outlive_terminal()
    config, roles = plan.config, plan.roles
    local_ray = KINDS[attempt.command].trainer(config).ray.address is None
    at_once = threading.Event()
    cut_short: str | None = None
    display = StepDisplay(run, attempt.start_step, config.max_steps)
    left = config.preemption.seconds if config.preemption else None
    with (
        stop_on_signals(run, at_once.set, left, display.say),
        display,
        background_jobs(run, config, attempt) as jobs,
        watching(config.preemption, lambda notice: stop_for(notice, run, display.say)),
    ):
        logs = BoundedLogs(run.logs)
        early = plan.early and plan.early.take(config)
        watched = {
            name: RoleSlot(name, run, config, local_ray=local_ray, early=early if name == "trainer" else None)
            for name in roles
        }
        try:
            while any(not role.ended for role in watched.values() if role.name in WORKING):
                check_in_place(run)
                stopping = run.stop_requested() is not None
                for role in watched.values():
                    role.look_after(display.step, stopping=stopping)
                jobs.look_after(display.step, stopping=stopping)
                if at_once.is_set():
                    raise KeyboardInterrupt
                if stopping and (cut_short := hopeless(run, watched) or out_of_time(run)):
                    break
                display.update()
                logs.look_after()
                time.sleep(0.05)
        finally:
            for role in reversed(watched.values()):
                role.begin_to_stop()
            for role in watched.values():  # servers end side by side
                role.stop()
            run.end_roles("stopped", *roles, *OWN_WORKERS)
            remove_private_folders()

        def update() -> None:
            check_in_place(run)
            display.update()

        update()
        if not cut_short and watched["trainer"].exit_code == 0:
            jobs.finish(update, lambda: run.stop_requested() is not None)
        elif run.stop_requested() and config.ckpt:
            left = run.seconds_left()
            seconds = config.ckpt.remote_grace if left is None else left
            jobs.finish_stopped(display.step, seconds, update, at_once.is_set)
    if cut_short:
        code = conclude_early(run, attempt, display.step, config, cut_short)
    else:
        code = conclude(run, attempt, watched["trainer"].exit_code, display.step, config)
    if code != EXIT_STOPPED or display.step != config.stop_after:  # else it is meant to go on
        say_findings(display.outcome())
    check_failures = say_what_failed(run, attempt.command, config, shorter(run.path))
    if account := display.account():
        print(account, flush=True)
    code = jobs.conclude(code)
    if code == 0:
        check_failures()
    return code


def check_in_place(run: RunDirectory) -> None:
    """See that the run directory is still where it was when it was locked.

    Raises:
        RoleFailed: it is not, so that nothing may be written there any more.
    """
    if run.has_moved():
        raise RoleFailed(
            f"{run.path} was moved, removed or replaced while the run was at work in it, so another run may "
            "be there now: nothing more is written. Where the folder is by now, --ckpt.resume auto goes on"
        )


def stop_for(notice: Notice, run: RunDirectory, tell: Callable[[str], None] = say) -> None:
    """Ask the run to save and stop, because this machine will be taken away; `tell` prints a line."""
    left = "" if notice.seconds is None else f" in {notice.seconds:.0f} s"
    run.request_stop(notice.reason, notice.seconds)
    tell(f"{notice.reason}{left}: stopping at the next step boundary")


def out_of_time(run: RunDirectory) -> str | None:
    """That the run must end now, if so: what is not saved yet does not get there any more."""
    left = run.seconds_left()
    return "the time that was left is over" if left is not None and left < 0 else None


def hopeless(run: RunDirectory, roles: Mapping[str, RoleSlot]) -> str | None:
    """Why a stopping run has nothing to wait for: nothing is unsaved, or no role is left that could save it.

    A trainer that has exited by itself has reported its outcome.
    """
    trainer = roles["trainer"]
    if trainer.lost:
        return trainer.lost
    if trainer.ended:
        return why_unsaved(run) if trainer.exit_code == EXIT_LOST else None
    entries = run.current_roles()
    rank = entries.get("trainer_rank0") if entries else None
    if entries is None or (rank and rank.state in ("done", "stopped")):
        return None
    if rank and rank.state == "failed":  # its driver is about to exit, or was about to replace it
        return RANK_DIED
    beat = read_note(run.heartbeat("trainer_rank0"), Beat)
    if not (rank and beat and rank.state == "running" and beat.pid == rank.pid and beat.unsaved):
        return "no step was in progress"
    if beat.waiting:  # for a role that will not return
        return next((role.lost for role in roles.values() if role.lost), None)
    return None


logger = logging.getLogger(__name__)

LARGEST = 32 << 20
"""Bytes of a log at which it is copied and begun anew, and of the copy."""
HEAD = 1 << 20
"""Bytes of its beginning that a copy has, if it leaves something out."""
PIECE = 1 << 20
LOOK_SECONDS = 1.0


class BoundedLogs:
    """Keeps all logs of a folder small."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._look_at = 0.0

    def look_after(self) -> None:
        """Begin those logs anew that are too large; call it often."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(OSError):  # a full disk, or a folder that is gone, is for others to report
            for path in self.folder.glob("*.log"):
                if path.stat().st_size > LARGEST:
                    begin_anew(path)


def begin_anew(path: Path) -> None:
    """Copy a log to `NAME.log.1` and cut it to nothing.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    copy, unfinished = path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.1.tmp")
    with open(path, "r+b") as log, open(unfinished, "wb") as out:
        size = os.fstat(log.fileno()).st_size
        in_json = os.pread(log.fileno(), 1, 0) == b"{"
        if size > LARGEST:
            out.write(log.read(HEAD))
            skipped = size - LARGEST
            out.write(b"\n" + _note(f"{skipped} bytes left out", path, in_json))
            log.seek(HEAD + skipped)
        while piece := log.read(PIECE):  # up to what was written last
            out.write(piece)
        unfinished.replace(copy)
        note = _note(f"the log goes on here; what was before is in {copy.name}", path, in_json)
        log.truncate(0)
        with open(path, "ab") as anew:
            anew.write(note)


def _note(text: str, log: Path, in_json: bool) -> bytes:
    """A line about the log itself."""
    if in_json:
        return json_line("INFO", log.stem, text, time.time()).encode() + b"\n"
    return f"[{text}]\n".encode()
