"""The process of a role, seen from its launcher."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from cairn.run.processes import kill_session
from cairn.run.signals import stop_signals_blocked

RAY_SETTINGS = {
    # Under `uv run`, Ray would zip the working directory and run the workers in a copy of it.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray's memory monitor kills the trainer even if another program fills the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would run workers at a lower priority than everything else.
    "RAY_worker_niceness": "0",
}
"""Environment variables that Ray reads when a role first imports it."""

LOCAL_RAY_SETTINGS = {
    # The default on macOS and Windows: the cluster listens on the loopback interface only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Variables for a role that starts a local cluster; otherwise Ray listens on every network interface."""

END = b"\0"
"""What a role writes into the pipe at its end, whatever that is: code of a user's that leaves the process
(os._exit) does not."""
LONGEST_MESSAGE = 32 << 10
"""Maximum bytes of an error message; less than a pipe's capacity."""


class RoleProcess:
    """A process that has a role, or will as a standby; it is the leader of its own session.

    Stop signals are blocked in it until it has installed handlers (`stop_on_signals`). Its output goes to
    `log`. If it fails, the error message also comes back through a pipe, as `last_words`.

    Args:
        role: trainer, orchestrator, inference or exporter.
        run: the run directory.
        log: file that its output is appended to.
        local_ray: a Ray cluster that it starts serves this machine only.
        standby: it waits for `begin` before it takes up the role.
    """

    def __init__(self, role: str, run: Path, log: Path, *, local_ray: bool, standby: bool = False):
        environment = {**RAY_SETTINGS, **(LOCAL_RAY_SETTINGS if local_ray else {}), **os.environ}
        if local_ray:
            environment |= _ray_token()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._words, words = os.pipe()
        os.set_blocking(self._words, False)
        argv = [sys.executable, "-m", "cairn.launch.role_main", role, str(run), str(os.getpid()), str(words)]
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
        self._heard = b""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._words)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it lives; the negative signal number if a signal ended it."""
        return self._process.poll()

    def begin(self) -> None:
        """Promote a standby: let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"begin\n")
        self._process.stdin.close()

    def last_words(self) -> str:
        """The message of the error that it ended with; empty if there is none."""
        return self._hear().replace(END, b"").decode(errors="replace")

    @property
    def came_to_its_end(self) -> bool:
        """Whether the process, which has exited, has left by its own end, rather than in the middle."""
        return END in self._hear()

    def _hear(self) -> bytes:
        with contextlib.suppress(BlockingIOError):  # a surviving child process holds the other end
            self._heard += os.read(self._words, LONGEST_MESSAGE + len(END))
        return self._heard

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


def tell_launcher(pipe: int, message: str) -> None:
    """In a role: write the error message to the launcher's pipe; what does not fit at once is cut off."""
    with contextlib.suppress(OSError):
        os.set_blocking(pipe, False)
        os.write(pipe, message.encode(errors="replace")[:LONGEST_MESSAGE])


def say_end(pipe: int) -> None:
    """In a role: tell the launcher that it ends by itself."""
    with contextlib.suppress(OSError):
        os.set_blocking(pipe, False)
        os.write(pipe, END)


def _ray_token() -> dict[str, str]:
    """An authentication token for one cluster, which its processes get in their environment.

    By default Ray writes one token for all clusters to a file in the home folder, perhaps readable by others.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
