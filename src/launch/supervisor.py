"""Runs the roles of an attempt, each in a process and a session of its own, and sees them through."""

import os
import signal
import subprocess
import time

from cairn.checkpoint.store import CheckpointStore
from cairn.launch.display import StepDisplay
from cairn.launch.main import EXIT_STOPPED
from cairn.launch.process import RoleFailed, log_end, start_role, stop_on_signals
from cairn.launch.roles import EXIT_LOST, WORKING
from cairn.run.directory import Attempt, RunDirectory

STOP_SECONDS = 20


def run_roles(run: RunDirectory, attempt: Attempt, roles: list[str], max_steps: int) -> int:
    """Start the roles, show the run's progress, and stop what is left at the end; returns the exit code.

    Raises:
        RoleFailed: a role died.
    """
    children: dict[str, subprocess.Popen] = {}
    try:
        with stop_on_signals(run), StepDisplay(run.metrics, attempt.start_step, max_steps) as display:
            for role in roles:
                children[role] = start_role(role, run.path, run.logs / f"{role}.log")
            _watch(children, run, display)
    finally:
        for role, child in reversed(children.items()):
            _stop(role, child, run)
    return _conclude(run, children["trainer"].returncode, display.step)


def _watch(children: dict[str, subprocess.Popen], run: RunDirectory, display: StepDisplay) -> None:
    """Wait until all roles that work towards an end have come to it.

    Raises:
        RoleFailed: a role died before that.
    """
    working = True
    while working:
        codes = {role: child.poll() for role, child in children.items()}
        for role, code in codes.items():
            if code not in (None, 0, EXIT_STOPPED, EXIT_LOST) or (code is not None and role not in WORKING):
                log = run.logs / f"{role}.log"
                raise RoleFailed(f"{role} died (exit code {code}); the end of {log}:\n{log_end(log)}")
        working = any(code is None for role, code in codes.items() if role in WORKING)
        display.update()
        time.sleep(0.05)


def _conclude(run: RunDirectory, code: int, step: int) -> int:
    """Say how the run ended; returns the launcher's exit code."""
    folder = CheckpointStore(run.checkpoints).folder(step)
    if code == EXIT_STOPPED:
        print(f"stopped at step {step}, saved in {folder}; --ckpt.resume auto goes on", flush=True)
        return EXIT_STOPPED
    if code == EXIT_LOST:
        raise RoleFailed(f"stopped at step {step}, which is lost: --ckpt would have saved it")
    saved = f", saved in {folder}" if step in CheckpointStore(run.checkpoints).steps() else ""
    print(f"done: step {step}{saved}", flush=True)
    return 0


def _stop(role: str, child: subprocess.Popen, run: RunDirectory) -> None:
    """End a role's process: a server is asked first; then, with its whole session, it is killed."""
    if child.poll() is not None:
        return
    child.terminate() if role not in WORKING else _kill(child)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(child)
        child.wait()
    run.set_role(role, "stopped" if child.returncode == 0 else "failed", child.pid)


def _kill(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()
