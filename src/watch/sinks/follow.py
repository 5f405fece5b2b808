"""Follows a run's files for one sink, and remembers how far the sink is."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cairn.run.files import make_folders, write_atomic
from cairn.run.jsonlines import JsonLines, Row
from cairn.run.view import RunView
from cairn.watch.sinks.sink import LeftOut, Sink, SinkRun

logger = logging.getLogger(__name__)

FOLDER = "sinks"
"""In the run directory: a file for what each sink has taken."""
AT_ONCE = 100
"""Rows that a sink is given in one call, at most."""


def digest(row: Row) -> str:
    """What tells an object of a file from any other."""
    return hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=8).hexdigest()


class TakenRows:
    """The objects of one file that a sink has taken, in their order, also those of earlier processes.

    Of each the digest is kept, so that objects which were taken back, and made again, are known from those
    which were not.

    Args:
        path: where it is remembered; None: nowhere.
    """

    def __init__(self, path: Path | None):
        self._log = None if path is None else JsonLines(path)
        known = self._log.rows() if self._log and self._log.path.exists() else []
        self.begun = bool(known)
        """Whether an earlier process has remembered anything."""
        self._digests = [row["digest"] for row in known if isinstance(row.get("digest"), str)]

    def __len__(self) -> int:
        return len(self._digests)

    def kept(self, objects: Sequence[Row]) -> int:
        """How many of those that were taken still stand at the beginning of the file."""
        count = len(self._digests)
        # Whoever takes objects back makes others in their place, so the last one stands for all before it.
        if count == 0 or (count <= len(objects) and digest(objects[count - 1]) == self._digests[-1]):
            return count
        pairs = zip(self._digests, objects, strict=False)
        return next(
            (n for n, (known, row) in enumerate(pairs) if digest(row) != known), min(count, len(objects))
        )

    def cut(self, count: int) -> None:
        """Forget all but the first `count`."""
        del self._digests[count:]
        if self._log and self._log.path.exists():
            lines = self._log.lines()
            with _remembered(self._log.path):
                write_atomic(self._log.path, b"".join(line + b"\n" for line, _ in lines[:count]))

    def add(self, objects: Sequence[Row]) -> None:
        """These were taken."""
        for row in objects:
            self._digests.append(digest(row))
            if self._log:
                with _remembered(self._log.path):
                    make_folders(self._log.path.parent)
                    where = {"step": row["step"]} if "step" in row else {}
                    self._log.append({**where, "digest": self._digests[-1]})


class _remembered(contextlib.suppress):
    """On a full disk a sink goes on, and after the next start it gets again what could not be noted."""

    def __init__(self, path: Path):
        super().__init__(OSError)
        self.path = path

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is not None:
            logger.warning("%s: what is sent is not remembered: %s", self.path, error)
        return super().__exit__(kind, error, trace)


class Follower:
    """Gives one sink what it has not taken yet; for one thread.

    Args:
        name: of the sink. make: gives a new object of it.
    """

    def __init__(self, name: str, make: Callable[[], Sink], run: SinkRun):
        self.name = name
        self._make = make
        self._run = run
        self._view = RunView(run.path)
        self._sink: Sink | None = None
        kind = type(make())
        self._takes_rows = kind.rows is not Sink.rows
        self._takes_events = kind.event is not Sink.event
        self._whole = kind.whole
        file = f"{''.join(c if c.isalnum() else '_' for c in name)}"
        folder = run.path / FOLDER
        self._rows = TakenRows(
            folder / f"{file}.rows.jsonl" if self._takes_rows and not self._whole else None
        )
        self._events = TakenRows(folder / f"{file}.events.jsonl" if self._takes_events else None)
        self._events_known = False

    def look(self, note: Callable[[str], None]) -> None:
        """Give the sink what is new.

        Args:
            note: told what was left out, and why.

        Raises:
            DamagedFile: a file of the run can't be read.
            Exception: whatever the sink raises.
        """
        rows = self._view.metrics() if self._takes_rows else []
        kept = self._rows.kept(rows)
        if kept < len(self._rows):
            self.let_go()
            self._rows.cut(kept)
        if self._sink is None:
            if self._whole:
                self._rows.cut(0)
                kept = 0
            sink = self._make()
            try:
                sink.begin(self._run, rows[kept - 1]["step"] if kept else 0)
            except BaseException:
                with contextlib.suppress(Exception):
                    sink.end()
                raise
            self._sink = sink
        while new := rows[len(self._rows) : len(self._rows) + AT_ONCE]:
            with _left_out(note):
                self._sink.rows(new)
            self._rows.add(new)
        if self._takes_events:
            self._give_events(self._sink, note)

    def _give_events(self, sink: Sink, note: Callable[[str], None]) -> None:
        events = self._view.history()
        if not self._events_known or self._events.kept(events) < len(self._events):
            self._know_events(events)
            self._events_known = True
        for event in events[len(self._events) :]:
            with _left_out(note):
                sink.event(event)
            self._events.add([event])

    def _know_events(self, events: Sequence[Row]) -> None:
        """A sink that is new to the run is told of no earlier attempt, nor is one of another run before."""
        kept = self._events.kept(events)
        if kept < len(self._events) or not self._events.begun:
            attempts = [n for n, event in enumerate(events) if event["event"] == "attempt"]
            self._events.cut(0)
            self._events.add(events[: attempts[-1] if attempts else 0])

    def let_go(self) -> None:
        """Close the sink's object; the next look makes another one."""
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.end()
            except Exception as error:
                logger.warning("%s could not be closed: %s: %s", self.name, type(error).__name__, error)

    def end(self) -> None:
        """Close the sink's object, now that all is sent.

        Raises:
            Exception: whatever the sink raises.
        """
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.end()


@contextlib.contextmanager
def _left_out(note: Callable[[str], None]):
    try:
        yield
    except LeftOut as error:
        note(f"{error}; what it was to take is left out")
