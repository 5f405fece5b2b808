"""The processes that the chaos harness has started, and their children, found by an environment variable."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "CAIRN_CHAOS"
STARTER = """
import os, signal, sys
from cairn.run.processes import die_with
die_with(int(sys.argv[1]))
for number in (signal.SIGHUP, signal.SIGINT):  # nohup and `&` ignore them
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Process:
    """A process, identified by its id and start time, since ids are reused."""

    pid: int
    started: int
    session: int
    command: str


class Family:
    """A command and all processes that it starts: those with the mark in their environment, and their
    sessions.

    (Ray's workers overwrite their environment, but stay in their driver's session.)
    """

    def __init__(self, environment: dict[str, str]):
        self._mark = secrets.token_hex(8)
        self.environment = {**os.environ, **environment, MARK: self._mark}
        self._ours: set[tuple[int, int]] = set()
        self._others: set[tuple[int, int]] = set()
        self._sessions: set[int] = set()

    def start(self, log: Path, command: list[str]) -> subprocess.Popen:
        """Start a command in its own session; it dies with the calling thread."""
        name, *arguments = command
        executable = str(Path(sys.executable).parent / name)
        with open(log, "ab") as out:
            return subprocess.Popen(
                [sys.executable, "-c", STARTER, str(os.getpid()), executable, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[Process]:
        """The family's living processes."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, _, session, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                    if state != "Z":
                        found[int(entry.name), int(rest[15])] = int(session)
        self._ours &= found.keys()
        self._others &= found.keys()
        in_execve: set[int] = set()
        for (pid, started), session in found.items():
            if (pid, started) not in self._others | self._ours:
                environment = _environment(pid)
                if not environment:  # the kernel shows none for a moment, so whose it is shows the next time
                    in_execve.add(pid)
                elif f"{MARK}={self._mark}".encode() in environment.split(b"\0"):
                    self._ours.add((pid, started))
                    self._sessions.add(session)
        ours = []
        for (pid, started), session in found.items():
            if (pid, started) in self._ours or session in self._sessions:
                self._ours.add((pid, started))
                ours.append(Process(pid, started, session, _command(pid)))
            elif pid not in in_execve:
                self._others.add((pid, started))
        self._sessions &= {process.session for process in ours}
        return ours

    def named(self, name: str) -> list[Process]:
        """The processes with `name` in their command line."""
        return [process for process in self.processes() if name in process.command]

    def kill(self, deadline: float = 20.0) -> None:
        """Kill all processes, and wait until they are gone."""
        end = time.monotonic() + deadline
        while (alive := self.processes()) and time.monotonic() < end:
            send(signal.SIGKILL, alive)
            time.sleep(0.02)


def send(number: int, processes: Iterable[Process]) -> None:
    """Send a signal to processes of a family; those that have ended are skipped."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""
