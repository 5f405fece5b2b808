"""The process of a run's sinks: `python -m cairn.watch.sinks.main RUN_DIR LAUNCHER`.

It follows the run directory until its launcher writes a byte to its standard input: then the run is over.
If that ends without one, the launcher was killed. Then each sink may send the rest, for `sinks.grace` seconds
at most. The names of those that have not managed to are printed, one a line.
"""

import fcntl
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cairn.config.sinks import SinksConfig
from cairn.run.errors import CairnError
from cairn.run.file_system import flock, open_lock
from cairn.run.files import DamagedFile
from cairn.run.history import History
from cairn.run.output import log_crashes, quoted, start_logging
from cairn.run.signals import STOP_SIGNALS
from cairn.run.view import RunView
from cairn.run.waiting import Backoff
from cairn.watch.sinks import make_sink, sinks_of
from cairn.watch.sinks.follow import FOLDER, Follower
from cairn.watch.sinks.sink import Sink, SinkRun

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the run's files."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0
"""Seconds until a sink that has failed is tried again: first, and at most."""
LAST_PAUSE = 0.5
"""The same once the run is over."""
HUNG_SECONDS = 60.0
"""A sink that has not returned for so long is told of."""
MOST_NOTES = 5
"""So many different things are told of one sink, at most, in one attempt of the run."""
LONGEST_NOTE = 500
LOCK = ".lock"
LOCK_SECONDS = 60.0
"""How long the sinks of an earlier attempt, whose launcher was killed, are waited for."""


class Notes:
    """What is told of one sink: in the log, and once in history.jsonl, from where the display takes it."""

    def __init__(self, name: str, history: History):
        self.name = name
        self._history = history
        self._told: set[str] = set()

    def __call__(self, reason: str) -> None:
        """Tell that something is wrong, unless it was told before."""
        reason = quoted(reason, LONGEST_NOTE)
        if reason in self._told or len(self._told) >= MOST_NOTES:
            return
        self._told.add(reason)
        logger.warning("%s: %s", self.name, reason)
        self._history.not_sent(self.name, reason)


class SinkThread(threading.Thread):
    """Does the work of one sink, so that one that hangs or fails holds up no other."""

    def __init__(self, name: str, make: Callable[[], Sink], run: SinkRun, history: History):
        super().__init__(name=name, daemon=True)
        self.note = Notes(name, history)
        self.complete = threading.Event()
        """Whether all was sent, after `finish`."""
        self._follower = Follower(name, make, run)
        self._over = threading.Event()
        self._busy_since: float | None = None

    def run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while not self.complete.is_set():
            over = self._over.is_set()
            self._busy_since = time.monotonic()
            try:
                self._follower.look(self.note)
                if over:
                    self._follower.end()
                    self.complete.set()
                if backoff.seconds:
                    logger.info("%s takes what it is sent again", self.name)
                backoff.reset()
            except Exception as error:  # of a sink of the user's own as well
                self.note(_words(error))
                self._follower.let_go()
                backoff.grow()
                if over:
                    time.sleep(LAST_PAUSE)
                else:
                    self._over.wait(backoff.seconds)
            finally:
                self._busy_since = None
            if not backoff.seconds:
                self._over.wait(LOOK_SECONDS)

    def finish(self) -> None:
        """The run is over: send what is left, and end."""
        self._over.set()

    def look_after(self) -> None:
        """Tell if the sink hangs."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > HUNG_SECONDS:
            self.note(f"it has not returned for {HUNG_SECONDS:g} s; what comes now waits until it does")


def _words(error: Exception) -> str:
    if isinstance(error, CairnError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def main(folder: Path, launcher: int, answer: Callable[[str], None]) -> int:
    """Follow the run in `folder` until standard input ends; returns the exit code.

    Args:
        answer: takes the name of each sink that has not sent all.
    """
    for number in STOP_SIGNALS:  # the launcher's affair; commands that sinks start act as others do
        signal.signal(number, lambda *_: None)
    os.nice(10)  # training comes first
    view = RunView(folder)
    attempt, config = view.run.attempt(), view.config()
    if attempt is None or config is None:
        raise DamagedFile(f"{view.run.roles} or {view.run.config}: is damaged or missing")
    sinks = SinksConfig.model_validate(config.get("sinks") or {})
    if config.get("log_format") == "json":
        start_logging("json", "sinks")
    host = socket.gethostname()
    run = SinkRun(view.run.path, attempt.run_id, attempt.number, attempt.command, host, config)
    lock = _lock(view.run.path / FOLDER)
    threads: list[SinkThread] = []
    for name in sinks_of(sinks):
        try:
            threads.append(SinkThread(name, partial(make_sink, name, sinks), run, view.run.history))
        except CairnError as error:  # a class of the user's own that has changed since the start
            Notes(name, view.run.history)(str(error))
    for thread in threads:
        thread.start()
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        for thread in threads:
            thread.look_after()
        if os.getppid() != launcher:  # a process that it has forked may hold the pipe open
            break
    # The pipe of a process that dies is closed before it has ended, so its parent's number says nothing yet.
    if os.getppid() != launcher or not os.read(sys.stdin.fileno(), 1):
        note_killed(view, attempt.number)
    unsent = finish(threads, sinks.grace)
    for name in unsent:
        answer(name)
    os.close(lock)
    return 0


def finish(threads: Sequence[SinkThread], seconds: float) -> list[str]:
    """Have all sinks send the rest, for so long at most; returns the names of those that have not."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.finish()
    for thread in threads:
        thread.complete.wait(max(end - time.monotonic(), 0))
    return [thread.name for thread in threads if not thread.complete.is_set()]


def note_killed(view: RunView, attempt: int) -> None:
    """Note that an attempt is over whose launcher was killed, so that nobody else does."""
    events = view.history()
    if any(event["event"] == "ended" and event["number"] == attempt for event in events):
        return
    rows = view.metrics()
    reason = "its command was killed; --ckpt.resume auto goes on with the run"
    view.run.history.ended(attempt, "killed", step=rows[-1]["step"] if rows else 0, reason=reason)


def _lock(folder: Path) -> int:
    """Wait for the sinks of an earlier attempt; they end soon after their launcher.

    Raises:
        TimeoutError: they don't.
    """
    folder.mkdir(exist_ok=True)
    path = folder / LOCK
    fd = open_lock(path)
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
            return fd
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"{path}: is held by the sinks of an earlier attempt") from None
            time.sleep(LAST_PAUSE)


if __name__ == "__main__":
    given, parent = sys.argv[1:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what sinks print goes into the log
    start_logging()
    log_crashes()
    code = main(Path(given), int(parent), lambda name: print(name, file=told, flush=True))
    sys.stdout.flush()
    os._exit(code)  # threads of sinks that hang are left alone
