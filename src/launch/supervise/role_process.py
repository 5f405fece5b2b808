"""The process of a role: how a launcher starts it, follows it, and ends it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO

from cairn.launch.ray.environment import LOCAL_RAY_SETTINGS, RAY_SETTINGS, cluster_token
from cairn.run.processes import kill_session
from cairn.run.signals import stop_signals_blocked

END = b"\0"
"""What a role writes into the pipe at its end, whatever that is: code of a user's that leaves the process
(os._exit) does not."""
LONGEST_MESSAGE = 32 << 10
"""Maximum bytes of an error message; less than a pipe's capacity."""


class RoleProcess:
    """A process that has a role, or will; it is the leader of its own session.

    Stop signals are blocked in it until it has installed handlers (`stop_on_signals`). Its output goes to
    `log`. If it fails, the error message also comes back through a pipe, as `error_message`.

    Args:
        role: trainer, orchestrator, inference or exporter.
        run: the run directory. None: the process is an early one (`cairn.launch.early`), which is told later
            (`take_up`), and imports what its role needs meanwhile.
        log: file that its output is appended to; None of an early process, whose output is lost until then.
        local_ray: a Ray cluster that it starts serves this machine only.
        standby: it waits for `begin` before it takes up the role.
        further: arguments of an early process.
    """

    def __init__(
        self,
        role: str,
        run: Path | None,
        log: Path | None,
        *,
        local_ray: bool,
        standby: bool = False,
        further: Sequence[str] = (),
    ):
        environment = {**RAY_SETTINGS, **(LOCAL_RAY_SETTINGS if local_ray else {}), **os.environ}
        if local_ray:
            environment |= cluster_token()
        self._messages, messages = os.pipe()
        os.set_blocking(self._messages, False)
        argv = [sys.executable, "-m", "cairn.launch.roles", role, str(run), str(os.getpid()), str(messages)]
        if run is None:
            argv = [sys.executable, "-m", "cairn.launch.early", role, str(os.getpid()), str(messages)]
            argv += further
        try:
            with _appended(log) as out, stop_signals_blocked():
                self._process = subprocess.Popen(
                    [*argv, "standby"] if standby else argv,
                    stdin=subprocess.PIPE if standby or run is None else subprocess.DEVNULL,
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

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._messages)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it lives; the negative signal number if a signal ended it."""
        return self._process.poll()

    def begin(self) -> None:
        """Promote a standby: let it begin."""
        self._tell("begin")

    def take_up(self, run: Path, log: Path) -> bool:
        """Tell an early process its run; False if it has died or had one: a new one must have the role."""
        if self._process.stdin is None or self._process.stdin.closed:
            return False
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._tell(json.dumps([str(run), str(log)]))
        except BrokenPipeError:
            return False
        return self.exit_code is None

    def _tell(self, line: str) -> None:
        """Write the only line that the process reads of its standard input."""
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(f"{line}\n".encode())

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


@contextlib.contextmanager
def _appended(log: Path | None) -> Generator[BinaryIO]:
    """The file that output is appended to."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with open(log or os.devnull, "ab") as out:
        yield out


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
