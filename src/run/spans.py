"""What each process of a run did when: spans of time, in `spans/<role>.jsonl` of the run directory.

A span costs its process one append to a list; the thread that gives signs of life writes the file once a
second. What is lost when a process is killed is the last second. Spans show where time went and nothing else
reads them, so a full disk costs spans and not the run.
"""

import contextlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.run.jsonlines import JsonLines, Row

LARGEST = 16 << 20
"""Bytes of a file from which a new one is begun; one older file is kept, as `<role>.1.jsonl`."""
MOST_WAITING = 100_000
"""Spans in memory at most; of more, which a file that can't be written leads to, the oldest are lost."""
MAIN = "main"
"""The lane of what the main thread does, one span after the other."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Something that a role did. begin: seconds since 1970. Spans of one lane may overlap; main's do not."""

    role: str
    lane: str
    name: str
    begin: float
    seconds: float
    about: Row


class Recorder:
    """Collects the spans of this process."""

    def __init__(self, path: Path):
        self.path = path
        self._waiting: deque[Row] = deque(maxlen=MOST_WAITING)

    def add(self, lane: str, name: str, begin: float, end: float, **about: Any) -> None:
        """Note a span, in seconds since 1970; any thread may call this."""
        self._waiting.append({"lane": lane, "name": name, "begin": begin, "seconds": end - begin, **about})

    def write(self) -> None:
        """Append to the file what was noted since the last call."""
        rows: list[Row] = []
        while self._waiting:
            rows.append(self._waiting.popleft())
        if not rows:
            return
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                file.write(text.encode())
                full = file.tell() > LARGEST
            if full:
                os.replace(self.path, self.path.with_suffix(".1.jsonl"))


_recorder: Recorder | None = None


def start(path: Path) -> Recorder:
    """Record this process's spans in `path` from now on."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder(path)
    _recorder.path = path
    return _recorder


def add(lane: str, name: str, begin: float, end: float | None = None, **about: Any) -> None:
    """Note a span that began at `begin`, in seconds since 1970, and has just ended, or did at `end`.

    Does nothing in a process that records no spans.
    """
    if _recorder is not None:
        _recorder.add(lane, name, begin, time.time() if end is None else end, **about)


@contextlib.contextmanager
def span(lane: str, name: str, **about: Any) -> Generator[None]:
    """Note what happens inside the block as a span, also if it raises."""
    begin = time.time()
    try:
        yield
    finally:
        add(lane, name, begin, **about)


class SpanFiles:
    """The spans of a run that are on disk; reads only what was added since it was asked before."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[Path, _SpanFile] = {}

    def current(self) -> list[TimeSpan]:
        """All of them, by role and then as they ended; damaged lines are left out.

        Raises:
            DamagedFile: a file as a whole can't be read.
        """
        paths = _files(self.folder)
        self._files = {path: self._files.get(path) or _SpanFile(path) for path in paths}
        return [span for path in paths for span in self._files[path].spans()]


class _SpanFile(JsonLines):
    """One file of spans."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._role = path.name.removesuffix(".jsonl").removesuffix(".1")
        self._spans: list[TimeSpan] = []

    def spans(self) -> list[TimeSpan]:
        added = self.new_rows()
        if self._reread:
            self._spans = []
        self._spans += [span for row in added if (span := self._span(row)) is not None]
        return self._spans

    def _span(self, row: Row) -> TimeSpan | None:
        lane, name, begin, seconds = (row.pop(key, None) for key in ("lane", "name", "begin", "seconds"))
        if isinstance(lane, str) and isinstance(name, str) and _is_time(begin) and _is_time(seconds):
            return TimeSpan(self._role, lane, name, float(begin), float(seconds), row)
        return None


def _files(folder: Path) -> list[Path]:
    """The files of spans, each role's older one first."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".jsonl"))
    except OSError:
        return []
    return [
        folder / name for name in sorted(names, key=lambda name: (name.partition(".")[0], len(name) * -1))
    ]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def phases_of(spans: Iterable[TimeSpan]) -> dict[str, dict[str, float]]:
    """Seconds of each role's main thread by kind of work: names that differ in numbers are one kind."""
    found: dict[str, dict[str, float]] = {}
    for one in spans:
        if one.lane == MAIN:
            phases = found.setdefault(one.role, {})
            name = re.sub(r"\d+", "N", one.name)
            phases[name] = phases.get(name, 0.0) + one.seconds
    return found


def chrome_trace(spans: Iterable[TimeSpan]) -> dict[str, Any]:
    """Spans in the JSON format that Perfetto and chrome://tracing open; times are in microseconds.

    Source: the Trace Event Format: complete events (`X`), and metadata (`M`) with the names of processes and
    threads. A role is a process, a lane a thread.
    """
    roles: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for one in spans:
        if one.role not in roles:
            roles[one.role] = len(roles) + 1
            events.append(_name("process_name", one.role, roles[one.role], 0))
        process = roles[one.role]
        if (one.role, one.lane) not in lanes:
            lanes[one.role, one.lane] = len(lanes) + 1
            events.append(_name("thread_name", one.lane, process, lanes[one.role, one.lane]))
        event = {"ph": "X", "name": one.name, "pid": process, "tid": lanes[one.role, one.lane]}
        times = {"ts": round(one.begin * 1e6), "dur": round(one.seconds * 1e6)}
        events.append({**event, **times, "args": one.about})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
