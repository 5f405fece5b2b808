"""An agent's process: started with its keeper, watched until its end, its output kept in part."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from cairn.run.processes import keeper_command, kill_descent

KEPT_HEAD, KEPT_TAIL = 8 << 10, 24 << 10
"""Bytes of an agent's output that are kept: its beginning and its end."""
QUOTED = 600
"""Characters of the output's end in an error message."""
LOG_BYTES = 16 << 20
"""Size at which the log of agents is renamed, and a new one begun; one old one is kept."""
LAST_SECONDS = 4.0
"""How long the end of an agent that is killed is waited for."""
LEAST_WAIT = 0.2
"""Seconds between two looks at an agent whose time is over unless it waits for the model."""


@dataclass(frozen=True)
class Ended:
    """How an agent ended: its exit code, which for a signal is its negative number, and its output."""

    code: int
    output: str

    @property
    def how(self) -> str:
        """In words."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"

    @property
    def last_words(self) -> str:
        """The end of its output, for an error message."""
        end = self.output.strip()[-QUOTED:]
        return f"; its last output: {end}" if end else "; it printed nothing"


class _Output:
    """The beginning and the end of what is added."""

    def __init__(self):
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def add(self, piece: bytes) -> None:
        room = KEPT_HEAD - len(self._head)
        self._head += piece[:room] if room > 0 else b""
        self._tail += piece[max(room, 0) :]
        if (over := len(self._tail) - KEPT_TAIL) > 0:
            self._left_out += over
            del self._tail[:over]

    @property
    def text(self) -> str:
        gap = f"\n[{self._left_out} bytes left out]\n".encode() if self._left_out else b""
        return bytes(self._head + gap + self._tail).decode(errors="replace")


async def run_agent(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    limit: float | None,
    waited: Callable[[], float],
    log: Callable[[Ended], None],
) -> Ended:
    """Run an agent to its end; if this is cancelled, the agent is killed with all that it has started.

    Args:
        environment: all of its variables.
        folder: where it works.
        limit: seconds that it may take; the seconds that `waited()` returns don't count.
        log: called with every end.

    Raises:
        TimeoutError: it took longer.
    """
    process, watched = await asyncio.get_running_loop().subprocess_exec(
        _Watched,
        *keeper_command(0, command, on_term="kill"),
        stdin=subprocess.PIPE,  # held open for as long as this process lives
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    begun = time.monotonic()
    try:
        while not watched.ended.done():
            left = None if limit is None else limit - (time.monotonic() - begun - waited())
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"the agent has not ended within {limit:g} s "
                    "(orchestrator.environment.args.time_limit allows more)"
                )
            await asyncio.wait({watched.ended}, timeout=None if left is None else max(left, LEAST_WAIT))
    finally:
        stdin, stdout = process.get_pipe_transport(0), process.get_pipe_transport(1)
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.close()  # its keeper kills what is left
            if not watched.ended.done():
                await asyncio.wait({watched.ended}, timeout=LAST_SECONDS)
            if process.get_returncode() is None:  # the keeper is stopped, or frozen
                await asyncio.to_thread(kill_descent, process.get_pid())
                await asyncio.wait({watched.ended}, timeout=LAST_SECONDS)
        finally:
            stdout.close()
            code = process.get_returncode()
            ended = Ended(-signal.SIGKILL if code is None else code, watched.output.text)
            log(ended)
    return ended


class _Watched(asyncio.SubprocessProtocol):
    """Keeps a process's output, and notes that it has ended and nothing else can print any more."""

    def __init__(self):
        self.output = _Output()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output.add(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def log_of_agents(path: Path) -> logging.Logger:
    """The log of the run's agents, which is bounded; for one path there is one."""
    log = logging.getLogger(f"cairn.agents.{path}")
    if not log.handlers:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, delay=True, errors="replace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(logging.INFO)
    return log


INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")
"""Variables that agents have from the orchestrator; others may hold secrets, and a model has the agent's
word."""


def inherited(further: Sequence[str]) -> dict[str, str]:
    """The orchestrator's variables that an agent gets."""
    return {name: os.environ[name] for name in (*INHERITED, *further) if name in os.environ}
