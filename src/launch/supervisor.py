"""Runs the roles of an attempt, each in a process and a session of its own, and sees them through."""

import subprocess
import time

from cairn.checkpoint.store import CheckpointStore
from cairn.launch.attempt import RunConfig
from cairn.launch.display import StepDisplay
from cairn.launch.main import EXIT_STOPPED
from cairn.launch.process import RoleFailed, kill_session, log_end, start_role, stop_on_signals
from cairn.launch.roles import EXIT_CRASHED, EXIT_LOST, WORKING
from cairn.run.directory import Attempt, RunDirectory

STOP_SECONDS = 20


def run_roles(run: RunDirectory, attempt: Attempt, roles: list[str], config: RunConfig) -> int:
    """Start the roles, start those again that die, and stop what is left at the end; returns the exit code.

    Raises:
        RoleFailed: a role failed for good.
    """
    with stop_on_signals(run), StepDisplay(run.metrics, attempt.start_step, config.max_steps) as display:
        watched = [_Role(name, run, config.max_restarts) for name in roles]
        try:
            working = True
            while working:
                for role in watched:
                    role.look_after(display.step)
                working = any(not role.ended for role in watched if role.name in WORKING)
                display.update()
                time.sleep(0.05)
        finally:
            for role in reversed(watched):
                role.stop()
    codes = {role.name: role.process.returncode for role in watched}
    return _conclude(run, codes["trainer"], display.step)


class _Role:
    """One role's process: the current one, if it was started again."""

    def __init__(self, name: str, run: RunDirectory, max_restarts: int):
        self.name = name
        self.run = run
        self.log = run.logs / f"{name}.log"
        self.max_restarts = max_restarts
        self.ended = False
        self._fruitless = 0  # restarts since a step was finished
        self._step = -1
        self._start_at: float | None = None
        self.process = start_role(name, run.path, self.log)

    def look_after(self, step: int) -> None:
        """Notice its end, and start it again if that was not to be; `step` is the run's newest.

        Raises:
            RoleFailed: it reported an error that would only come again, or died too often.
        """
        if self._start_at is not None:
            if time.monotonic() >= self._start_at:
                self._start_at = None
                self.process = start_role(self.name, self.run.path, self.log)
            return
        code = self.process.poll()
        if code is None or self.ended:
            return
        if self.name in WORKING and code in (0, EXIT_STOPPED, EXIT_LOST):
            self.ended = True
            return
        kill_session(self.process.pid)  # or its workers go on for a while, beside the new ones
        self.run.set_role(self.name, "failed", self.process.pid)
        self._fruitless = self._fruitless + 1 if step == self._step else 1
        self._step = step
        crashed = code < 0 or code == EXIT_CRASHED or self.name not in WORKING
        if not crashed or self._fruitless > self.max_restarts:
            raise RoleFailed(
                f"{self.name} died (exit code {code}); the end of {self.log}:\n{log_end(self.log)}"
            )
        wait = 0.0 if self._fruitless == 1 else min(2.0**self._fruitless, 30.0)
        print(f"{self.name} died (exit code {code}) and is started again", flush=True)
        self._start_at = time.monotonic() + wait

    def stop(self) -> None:
        """End its process: a server is asked first; then, with its whole session, it is killed."""
        if self.process.poll() is not None:
            kill_session(self.process.pid)
            return
        self.process.terminate() if self.name not in WORKING else kill_session(self.process.pid)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            kill_session(self.process.pid)
            self.process.wait()
        state = "stopped" if self.process.returncode == 0 else "failed"
        self.run.set_role(self.name, state, self.process.pid)


def _conclude(run: RunDirectory, code: int, step: int) -> int:
    """Say how the run ended; returns the launcher's exit code."""
    store = CheckpointStore(run.checkpoints)
    folder = store.folder(step)
    if code == EXIT_STOPPED:
        print(f"stopped at step {step}, saved in {folder}; --ckpt.resume auto goes on", flush=True)
        return EXIT_STOPPED
    if code == EXIT_LOST:
        raise RoleFailed(f"stopped at step {step}, which is lost: --ckpt would have saved it")
    saved = f", saved in {folder}" if store.exists(step) else ""
    print(f"done: step {step}{saved}", flush=True)
    return 0
