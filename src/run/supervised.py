"""Processes that must always be there: how they are started, watched, and when a dead one is replaced.

Whoever supervises them looks after them often: the launcher after roles, jobs and ranks of a run
(`launch/supervise/`), and who has a server of its own after that (`SupervisedServer`).
"""

import contextlib
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from cairn.run.heartbeat import Watch
from cairn.run.processes import kill_session
from cairn.run.signals import stop_signals_blocked

LOOK_SECONDS = 0.5
"""Seconds between two checks of a heartbeat."""


class Watched:
    """Work that a process does, with a name, a log, and a file for heartbeats."""

    def __init__(self, name: str, log: Path, heartbeat: Path):
        self.name = name
        self.log = log
        self._heartbeat = heartbeat
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
        self._watch = Watch(
            self._heartbeat, pid, silence=silence, standstill=standstill, setting=setting, lengthy=lengthy
        )
        self._look_at = 0.0

    def watch_server(self, pid: int, *, silence: float, lengthy: float) -> None:
        """Watch a server, which counts as hung if it says nothing for `silence` seconds; but while it is
        being given weights, for `lengthy` seconds."""
        self.watch_over(
            pid, silence=silence, standstill=silence, setting="--heartbeat-timeout", lengthy=lengthy
        )

    def hang(self) -> str | None:
        """Why the living process counts as hung; None if it does not. Call it often."""
        if self._watch is None or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()


class SupervisedProcess:
    """A process that leads a session of its own.

    Stop signals are blocked in it until it has installed handlers (`on_stop_signals`).

    Args:
        log: file that its output is appended to.
        environment: its variables (default: those of this process).
        stdin: what it reads; as for `subprocess.Popen`.
        pass_fds: descriptors that it inherits.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out, stop_signals_blocked():
            self._process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it lives; the negative signal number if a signal ended it."""
        return self._process.poll()

    def send(self, text: bytes) -> None:
        """Write `text` into its standard input, which has to be a pipe."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, as `exit_code` says
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Send no more."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send it the signal `number`, unless it has ended."""
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


# When to restart a dead process and when to give up: one rule for all.


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


Process = TypeVar("Process", bound=SupervisedProcess)


class Supervised(Watched, ABC, Generic[Process]):
    """Work that some process must always be doing: one that dies, or hangs, is replaced.

    Args:
        rule: when a process is replaced, and when none is any more.
    """

    _process: Process
    """The newest one."""

    def __init__(self, name: str, log: Path, heartbeat: Path, rule: RestartRule):
        super().__init__(name, log, heartbeat)
        self._rule = rule
        self._restart_at: float | None = None
        """When to start the next process (`time.monotonic`); None if there is one."""
        self._restarted = False

    @abstractmethod
    def _start(self) -> Process:
        """Start a process, and watch its heartbeat."""

    def _begin(self) -> None:
        self._restart_at = None
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the newest process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the newest process; None while it lives."""
        return self._process.exit_code

    def _look(self) -> str | None:
        """How the process has died, or why it counts as hung. Starts the next one instead if it is due.

        None if a process does its work, or the next one is waited for.
        """
        if self._restart_at is not None:
            if time.monotonic() >= self._restart_at:
                self._begin()
            return None
        if (code := self.exit_code) is not None:
            return f"died (exit code {code})"
        hang = self.hang()
        return hang and f"hung ({hang})"

    def _plan_restart(self, step: int, *, excused: bool = False) -> bool:
        """Set the time of the next process; False if the rule (`RestartRule.wait_after_death`) gives up."""
        if (wait := self._rule.wait_after_death(step, excused=excused)) is None:
            return False
        self._restart_at = time.monotonic() + wait
        self._restarted = True
        return True
