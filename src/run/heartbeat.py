"""Heartbeats: a file in which a process says what it is doing, for its supervisor.

A thread writes the file every second, so a stopped process falls silent. The main thread notes each time it
begins something new, so a hanging process shows no new notes. Waiting for another process is no hang, because
each such wait has a deadline of its own.
"""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from cairn.run import spans
from cairn.run.files import read_note, write_json

INTERVAL = 1.0
"""Seconds between two heartbeats."""
LONGEST_LOOK = 2.0
"""Seconds that count at most between two looks; a longer gap means that the watcher itself was stopped."""


@dataclass(frozen=True)
class Beat:
    """The content of the file.

    beats: how often the thread has written. marks: how often the main thread began something new. since: when
    it began what it is `doing`, in seconds since 1970. unsaved: it holds results that are in no checkpoint.
    lengthy: what it is doing may take longer than what it does otherwise.
    """

    pid: int
    beats: int
    marks: int
    doing: str
    waiting: bool
    since: float
    unsaved: bool = False
    lengthy: bool = False


class _Heart:
    """This process's own heartbeat."""

    def __init__(self, path: Path):
        self.path = path
        self.doing = "starting"
        self.waiting = False
        self.unsaved = False
        self.lengthy = False
        self.marks = 0
        self.since = time.time()
        self.spans: spans.Recorder | None = None
        self.span_since = self.since
        self._writing = threading.Lock()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.beat(0)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        beats = 0
        while True:
            time.sleep(INTERVAL)
            beats += 1
            self.beat(beats)
            if self.spans is not None:
                self.spans.write()

    def beat(self, beats: int) -> None:
        beat = Beat(
            os.getpid(), beats, self.marks, self.doing, self.waiting, self.since, self.unsaved, self.lengthy
        )
        with contextlib.suppress(OSError), self._writing:  # a full disk is for others to report
            write_json(self.path, asdict(beat))


_heart: _Heart | None = None


def start(path: Path, spans_path: Path | None = None) -> None:
    """From now on write this process's heartbeats to `path`. A second call changes the path.

    spans_path: the file for what it was doing when (`run/spans.py`), if that is to be recorded.
    """
    global _heart
    if _heart is None:
        _heart = _Heart(path)
    else:
        _heart.path = path
        _heart.beat(-1)
    if spans_path is not None:
        if _heart.spans is None:
            atexit.register(end)
        _heart.spans = spans.start(spans_path)


def end() -> None:
    """Write the spans of this process, whose main thread ends."""
    if _heart is not None and _heart.spans is not None:
        doing("ended")
        _heart.spans.write()


def doing(what: str, *, waiting: bool = False, lengthy: bool = False) -> None:
    """Note that the main thread begins something new. Does nothing unless `start` was called."""
    if _heart is not None:
        now = time.time()
        if _heart.spans is not None and (what, waiting) != (_heart.doing, _heart.waiting):
            _heart.spans.add(spans.MAIN, _heart.doing, _heart.span_since, now, waiting=_heart.waiting)
            _heart.span_since = now
        _heart.doing, _heart.waiting, _heart.since = what, waiting, now
        _heart.lengthy = lengthy
        _heart.marks += 1


def holds_unsaved(unsaved: bool) -> None:
    """Say whether this process holds results that are in no checkpoint, so that a stop should wait for it."""
    if _heart is not None and _heart.unsaved != unsaved:
        _heart.unsaved = unsaved
        _heart.beat(-1)


@contextlib.contextmanager
def waiting_for(whom: str) -> Generator[None]:
    """Mark the main thread as waiting for another process inside the block; other threads are ignored."""
    if _heart is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _heart.doing
    doing(f"waiting for {whom}", waiting=True)
    try:
        yield
    finally:
        doing(before)


class Watch:
    """Follows another process's heartbeats.

    Args:
        path: the file that the process writes.
        pid: the process; content that another process left in the file is ignored.
        silence: seconds without a heartbeat after which the process counts as stopped.
        standstill: seconds without progress after which it counts as hanging.
        setting: the flag that raises `standstill`, for the message.
        lengthy: the same as `standstill`, for what the process says may take long; --hang-timeout raises it.
    """

    def __init__(
        self,
        path: Path,
        pid: int,
        *,
        silence: float,
        standstill: float,
        setting: str = "--hang-timeout",
        lengthy: float | None = None,
    ):
        self.setting = setting
        self.path = path
        self.pid = pid
        self.limits = {"silent": silence, "still": standstill, "lengthy": max(standstill, lengthy or 0)}
        self._seen = {"silent": -1, "still": -1}
        self._ages = {"silent": 0.0, "still": 0.0}
        self._looked = time.monotonic()

    def problem(self) -> str | None:
        """What is wrong with the process, if anything is; call it every second or so."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LONGEST_LOOK), now
        beat = read_note(self.path, Beat)
        if beat is None or beat.pid != self.pid:
            beat = Beat(self.pid, -1, -1, "starting", False, 0.0)
        for kind, value in (("silent", beat.beats), ("still", beat.marks)):
            moved = value != self._seen[kind]
            self._seen[kind] = value
            self._ages[kind] = 0.0 if moved else self._ages[kind] + passed
        if beat.waiting:
            self._ages["still"] = 0.0
        if self._ages["silent"] > self.limits["silent"]:
            return (
                f"no sign of life for {self.limits['silent']:g} s (last: {beat.doing}); "
                "--heartbeat-timeout allows more"
            )
        limit, setting = self.limits["still"], self.setting
        if beat.lengthy and self.limits["lengthy"] > limit:
            limit, setting = self.limits["lengthy"], "--hang-timeout"
        if self._ages["still"] > limit:
            return f"no progress for {limit:g} s ({beat.doing}); {setting} allows more"
        return None
