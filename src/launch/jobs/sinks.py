"""The process of a run's sinks, seen from its launcher.

It is kept alive, and nobody waits for it while the run goes on.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import IO

from cairn.config.kinds import RunConfig
from cairn.launch.start import StartDamaged
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_STOPPED
from cairn.run.files import DamagedFile, make_folders
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt
from cairn.run.processes import kill_session
from cairn.run.signals import on_stop_signals

logger = logging.getLogger(__name__)

LOG = "sinks.log"
ALL = "all sinks"
PAUSES = (0.0, 4.0, 15.0, 60.0, 60.0)
"""Seconds until a dead process is replaced, by the number of deaths before. After so many deaths nothing more
is sent in this attempt of the run."""
MARGIN_SECONDS = 2.0
"""What the process may take to end, beside `sinks.grace`."""


class SinksProcess:
    """Keeps a process at work for the sinks (`watch/sinks/main.py`) until `end`."""

    def __init__(self, run: RunDirectory):
        self.run = run
        self._over = threading.Event()
        self._lock = threading.Lock()
        """Held while a process takes the place of a dead one."""
        self._process = self._started()
        threading.Thread(target=self._keep, name="sinks", daemon=True).start()

    def _started(self) -> "subprocess.Popen[bytes] | None":
        """A process; None if the system can't start one, which is noted."""
        try:
            make_folders(self.run.logs)
            with open(self.run.logs / LOG, "ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "cairn.watch.sinks.main", str(self.run.path), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            self.run.history.not_sent(ALL, f"their process can't be started: {error.strerror}")
            return None

    def _keep(self) -> None:
        """Replace the process when it dies, until the run is over."""
        for pause in PAUSES:
            process = self._process
            if process is None:
                return
            code = process.wait()
            if self._over.is_set():
                return
            kill_session(process.pid)
            logger.warning("the process of the sinks died (exit code %d); see %s", code, self.run.logs / LOG)
            if self._over.wait(pause):
                return
            with self._lock:
                if self._over.is_set():
                    return
                self._process = self._started()
        self.run.history.not_sent(ALL, f"their process died too often; see {self.run.logs / LOG}")

    def end(self, seconds: float) -> list[str]:
        """Have the process send what is left, for so long at most; returns the sinks that have not sent all.

        A stop signal ends the wait.
        """
        with self._lock:
            self._over.set()
            process = self._process
        if process is None:
            return [ALL]
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b".")
            process.stdin.close()
        heard, over = bytearray(), threading.Event()
        interrupted = False

        def hear(pipe: IO[bytes]) -> None:
            heard.extend(pipe.read())
            over.set()

        def interrupt(_name: str) -> None:
            nonlocal interrupted
            interrupted = True
            over.set()

        threading.Thread(target=hear, args=(process.stdout,), name="unsent", daemon=True).start()
        with on_stop_signals(interrupt):
            ended = over.wait(seconds + MARGIN_SECONDS) and not interrupted
        if not ended:
            kill_session(process.pid)
        code = process.wait()
        return heard.decode(errors="replace").splitlines() if ended and code == 0 else [ALL]


@contextlib.contextmanager
def sinks_beside(run: RunDirectory, config: RunConfig, attempt: Attempt) -> Generator[Callable[[int], int]]:
    """Send rows and events to the run's sinks as long as the block lasts, and note how the attempt has ended.

    Gives a function that takes the launcher's exit code and returns it.
    """
    code = EXIT_STOPPED

    def take(found: int) -> int:
        nonlocal code
        code = found
        return found

    process = SinksProcess(run) if config.sinks.are_on else None
    try:
        yield take
        state = {0: "done", EXIT_STOPPED: "stopped"}.get(code, "failed")
        _note_end(run, attempt, state, "" if state == "done" else run.stop_requested() or "")
    except StartDamaged:  # another attempt begins
        raise
    except BaseException as error:
        _note_end(run, attempt, "failed", _first_and_last(error))
        raise
    finally:
        if process is not None:
            left = run.seconds_left()
            seconds = config.sinks.grace if left is None else min(config.sinks.grace, left - MARGIN_SECONDS)
            _say_unsent(process.end(max(seconds, 0.0)))


def finish_sinks(config: RunConfig) -> None:
    """Send what the sinks of a complete run still lack.

    Raises:
        UsageError: another process is running in the run directory.
    """
    run = config.run_directory()
    if not config.sinks.are_on or run.attempt() is None:
        return
    lock(run)
    try:
        _say_unsent(SinksProcess(run).end(config.sinks.grace))
    finally:
        run.unlock()


def _first_and_last(error: BaseException) -> str:
    """The first and the last line of an error: in between may be the end of a log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__


def _note_end(run: RunDirectory, attempt: Attempt, state: str, reason: str) -> None:
    if run.has_moved():
        return
    with contextlib.suppress(OSError, DamagedFile):
        rows = run.metrics.rows()
        step = rows[-1]["step"] if rows else attempt.start_step
        run.history.ended(attempt.number, state, step=step, reason=reason)


def _say_unsent(names: list[str]) -> None:
    if names:
        print(
            f"warning: not everything was sent to {', '.join(names)} (logs/{LOG} says why); the same command "
            "sends it when the run goes on",
            flush=True,
        )
