"""A role's process, as its launcher holds it."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from cairn.launch.process import kill_session
from cairn.run.signals import stop_signals_blocked

RAY_SETTINGS = {
    # Under `uv run` Ray would zip the working directory and run the workers in a copy of it.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Its memory monitor kills the trainer when somebody else fills the machine.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would give training less of the processor than everything else that runs.
    "RAY_worker_niceness": "0",
}
"""What Ray reads when it is imported, by whichever module of a role that is."""

LOCAL_RAY_SETTINGS = {
    # Named after the systems where it is the default: a cluster of this machine alone, on the loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""And where it starts a cluster of its own; else that would listen on every network of the machine."""

LONGEST_MESSAGE = 32 << 10
"""Bytes of last words: less than a pipe holds."""


class RoleProcess:
    """A process that has, or as a standby will have, a role; in a session of its own.

    Stop signals are blocked in it until it is ready to heed them (`stop_on_signals`). Its output goes to
    `log`. The message of the error that it ends with also comes back through a pipe, as `last_words`.

    Args:
        role: trainer, orchestrator or inference.
        run: the run's directory.
        log: the file that its output is appended to.
        local_ray: a Ray cluster that it starts is for this machine alone.
        standby: it does not begin before it is told to.
    """

    def __init__(self, role: str, run: Path, log: Path, *, local_ray: bool, standby: bool = False):
        environment = {**RAY_SETTINGS, **(LOCAL_RAY_SETTINGS if local_ray else {}), **os.environ}
        if local_ray:
            environment |= _ray_token()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._words, words = os.pipe()
        os.set_blocking(self._words, False)
        argv = [sys.executable, "-m", "cairn.launch.entry", role, str(run), str(os.getpid()), str(words)]
        try:
            with open(log, "ab") as out, stop_signals_blocked():
                self._process = subprocess.Popen(
                    [*argv, "standby"] if standby else argv,
                    stdin=subprocess.PIPE if standby else subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    pass_fds=[words],
                )
        finally:
            os.close(words)
        self.pid = self._process.pid

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._words)

    @property
    def exit_code(self) -> int | None:
        """None while it lives; of one that a signal ended, the signal's number, negative."""
        return self._process.poll()

    def begin(self) -> None:
        """Tell a standby to begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"begin\n")
        self._process.stdin.close()

    def last_words(self) -> str:
        """The message of the error that it ended with; empty if it left none."""
        try:
            return os.read(self._words, LONGEST_MESSAGE).decode(errors="replace")
        except BlockingIOError:  # a process that it left behind holds the other end
            return ""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end, but no longer than that; returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill what is left of it and of all that it started; they can't do any more harm then."""
        kill_session(self.pid)
        self._process.wait()


def tell_launcher(pipe: int, message: str) -> None:
    """In a role: leave its last words; what the pipe does not hold at once is cut."""
    with contextlib.suppress(OSError):
        os.set_blocking(pipe, False)
        os.write(pipe, message.encode()[:LONGEST_MESSAGE])


def _ray_token() -> dict[str, str]:
    """A token of its own for one cluster, whose processes get it in their environment.

    Ray would write one for all clusters to a file in the home folder, which others may be able to read.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
