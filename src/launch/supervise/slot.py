"""A slot that some process must always fill, the process of a role, and when a dead one is replaced."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from cairn.config.kinds import RunConfig
from cairn.launch.ray.environment import (
    LOCAL_RAY_SETTINGS,
    RAY_SETTINGS,
    cluster_token,
    remove_private_folders,
)
from cairn.run.directory import RunDirectory
from cairn.run.heartbeat import Watch
from cairn.run.processes import kill_session
from cairn.run.signals import stop_signals_blocked

LOOK_SECONDS = 0.5
"""Seconds between two checks of a heartbeat."""


class Slot:
    """Work that some process must always be doing, with one name in roles.json, heartbeats/ and logs/.

    When the process in the slot dies, or is killed because it hangs, a spare or a new process takes over: a
    restart.
    """

    def __init__(self, name: str, log: Path, run: RunDirectory):
        self.name = name
        self.log = log
        self.run = run
        self._watch: Watch | None = None
        self._look_at = 0.0

    def watch_over(
        self,
        pid: int,
        *,
        silence: float,
        standstill: float,
        setting: str = "--hang-timeout",
        lengthy: float | None = None,
    ) -> None:
        """Watch the heartbeat of the process `pid`; see `Watch` for the arguments."""
        path = self.run.heartbeat(self.name)
        self._watch = Watch(
            path, pid, silence=silence, standstill=standstill, setting=setting, lengthy=lengthy
        )
        self._look_at = 0.0

    def hang(self) -> str | None:
        """Why the living process counts as hung; None if it does not. Call it often."""
        if self._watch is None or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()

    def note_restart(self, reason: str, how: str, *, step: int) -> None:
        """Record in history.jsonl that the process is replaced; `step` is the run's newest step."""
        self.run.history.restart(self.name, step=step, reason=reason, how=how)


# When to restart a dead process and when to give up: one rule for roles and ranks.


LONGEST_WAIT = 30.0
MOST_EXCUSED = 200
"""Restarts without a new step that don't count because a call of user code was to blame: each such call has a
bounded number of tries, and an environment too many of whose prompts fail ends the run."""


class RestartRule:
    """Restart at once, then after 4, 8, 16 and 30 seconds; give up if the restarts bring no new step.

    Args:
        max_restarts: restarts without a new step after which it gives up.
    """

    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self._fruitless = 0
        self._excused, self._excused_at = 0, -1
        self._step = -1

    def wait_after_death(self, step: int, *, excused: bool = False) -> float | None:
        """Seconds to wait before the restart, or None to give up; `step` is the newest finished step.

        Recomputing a step is no progress.

        Args:
            excused: a call of user code was to blame, for which the death counts as a failed try.
        """
        if step > self._excused_at:
            self._excused, self._excused_at = 0, step
        if excused and self._excused < MOST_EXCUSED:
            self._excused += 1
            return 0.0
        self._fruitless = 1 if step > self._step else self._fruitless + 1
        self._step = max(self._step, step)
        if self._fruitless > self.max_restarts:
            return None
        return 0.0 if self._fruitless == 1 else min(2.0**self._fruitless, LONGEST_WAIT)


END = b"\0"
"""What a role writes into the pipe at its end, whatever that is: code of a user's that leaves the process
(os._exit) does not."""
LONGEST_MESSAGE = 32 << 10
"""Maximum bytes of an error message; less than a pipe's capacity."""


Turn = Literal["at once", "standby", "early"]
"""When a process takes up its role: a standby when the launcher promotes it; an early one, which is started
before there is a run directory and gets the run's settings from the launcher, when the directory is there."""


class RoleProcess:
    """A process that has a role, or will have it; it is the leader of its own session.

    Stop signals are blocked in it until it has installed handlers (`stop_on_signals`). Its output goes to
    `log`. If it fails, the error message also comes back through a pipe, as `error_message`.

    Args:
        role: trainer, orchestrator, inference or exporter.
        run: the run directory.
        log: file that its output is appended to.
        local_ray: a Ray cluster that it starts serves this machine only.
        turn: when it takes up the role.
        message: a line for an early process.
    """

    def __init__(
        self,
        role: str,
        run: Path,
        log: Path,
        *,
        local_ray: bool,
        turn: Turn = "at once",
        message: str = "",
    ):
        environment = {**RAY_SETTINGS, **(LOCAL_RAY_SETTINGS if local_ray else {}), **os.environ}
        if local_ray:
            environment |= cluster_token()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._messages, messages = os.pipe()
        os.set_blocking(self._messages, False)
        argv = ["-m", "cairn.launch.roles", role, str(run), str(os.getpid()), str(messages), turn]
        try:
            with open(log, "ab") as out, stop_signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, *argv],
                    stdin=subprocess.DEVNULL if turn == "at once" else subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    pass_fds=[messages],
                )
        finally:
            os.close(messages)
        self.pid = self._process.pid
        self._received = b""
        if message:
            self._write(f"{message}\n")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._messages)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it lives; the negative signal number if a signal ended it."""
        return self._process.poll()

    def begin(self) -> None:
        """Let a process that waits for its turn begin."""
        self._write("begin\n")
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, as `exit_code` says
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def error_message(self) -> str:
        """The message of the error that it ended with; empty if there is none."""
        return self._receive().replace(END, b"").decode(errors="replace")

    @property
    def ended_by_itself(self) -> bool:
        """Whether the process, which has exited, ran to its end, rather than left in the middle."""
        return END in self._receive()

    def _receive(self) -> bytes:
        with contextlib.suppress(BlockingIOError):  # a surviving child process holds the other end
            self._received += os.read(self._messages, LONGEST_MESSAGE + len(END))
        return self._received

    def signal(self, number: signal.Signals) -> None:
        """Send it the signal `number`."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for it to end; returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill it and everything in its session with SIGKILL."""
        kill_session(self.pid)
        self._process.wait()


class EarlyProcess:
    """The process of a role that is started while the plan of the run is still being made.

    To import PyTorch and to start Ray takes seconds, and to look at the data takes others. So the trainer's
    driver starts as soon as its settings are known, and with it Ray and the ranks' workers. Until the plan is
    finished they do nothing but import: whatever refuses the run ends them, and they have written nothing.

    Args:
        command: of the run.
        config: its settings.
    """

    def __init__(self, role: str, command: str, config: RunConfig):
        nowhere = Path(os.devnull)  # the run has no folder yet
        self._process: RoleProcess | None = RoleProcess(
            role,
            config.run_directory().path,
            nowhere,
            local_ray=True,
            turn="early",
            message=json.dumps([command, config.model_dump(mode="json")]),
        )
        self._config = config

    def take(self, config: RunConfig) -> RoleProcess | None:
        """The process, once, if these are its settings."""
        process = self._process
        if process is None or config != self._config:
            return None
        self._process = None
        return process

    def close(self) -> None:
        """End the process, unless it was taken."""
        if self._process is not None:
            self._process.kill()
            self._process = None
            remove_private_folders()


def send_error(pipe: int, message: str) -> None:
    """In a role: write the error message to the launcher's pipe; what does not fit at once is cut off."""
    with contextlib.suppress(OSError):
        os.set_blocking(pipe, False)
        os.write(pipe, message.encode(errors="replace")[:LONGEST_MESSAGE])


def send_end(pipe: int) -> None:
    """In a role: tell the launcher that it ends by itself."""
    with contextlib.suppress(OSError):
        os.set_blocking(pipe, False)
        os.write(pipe, END)
