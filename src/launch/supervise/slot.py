"""The process of a role, and the slot of a run that such a process must always fill."""

import contextlib
import json
import os
import subprocess
import sys
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
from cairn.run.supervised import RestartRule, Supervised, SupervisedProcess

END = b"\0"
"""What a role writes into the pipe at its end, whatever that is: code of a user's that leaves the process
(os._exit) does not."""
LONGEST_MESSAGE = 32 << 10
"""Maximum bytes of an error message; less than a pipe's capacity."""


Turn = Literal["at once", "standby", "early"]
"""When a process takes up its role: a standby when the launcher promotes it; an early one, which is started
before there is a run directory and gets the run's settings from the launcher, when the directory is there."""


class RoleProcess(SupervisedProcess):
    """A process that has a role, or will have it.

    If it fails, the error message also comes back through a pipe, as `error_message`.

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
        self._messages, messages = os.pipe()
        os.set_blocking(self._messages, False)
        argv = ["-m", "cairn.launch.roles", role, str(run), str(os.getpid()), str(messages), turn]
        try:
            super().__init__(
                [sys.executable, *argv],
                log,
                environment=environment,
                stdin=subprocess.DEVNULL if turn == "at once" else subprocess.PIPE,
                pass_fds=[messages],
            )
        finally:
            os.close(messages)
        self._received = b""
        if message:
            self.send(f"{message}\n".encode())

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._messages)

    def begin(self) -> None:
        """Let a process that waits for its turn begin."""
        self.send(b"begin\n")
        self.close_input()

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


class Slot(Supervised[RoleProcess]):
    """A role or a job of a run, which has one name in roles.json, heartbeats/ and logs/."""

    def __init__(self, name: str, run: RunDirectory, config: RunConfig):
        rule = RestartRule(config.max_restarts)
        super().__init__(name, run.logs / f"{name}.log", run.heartbeat(name), rule)
        self.run = run
        self.config = config
        self.ended = False
        """Whether the work is done or given up."""


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
        """The process, once; it is ended instead if these are not its settings."""
        if config != self._config:
            self.close()
        process, self._process = self._process, None
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
