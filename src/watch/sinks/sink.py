"""What a sink is, and what it knows of its run."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cairn.run.errors import CairnError
from cairn.run.jsonlines import Row


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink is told of.

    path: the run directory. attempt: its number. command: that started the run. host: this machine's name.
    config: the run's resolved configuration, as JSON.
    """

    path: Path
    run_id: str
    attempt: int
    command: str
    host: str
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The run's name: that of its directory."""
        return self.path.name


class LeftOut(CairnError):
    """What a sink was given can't be brought there, now or later: that is told, and the next is given."""


class Sink:
    """Takes a run's rows and events, and brings them somewhere else.

    A sink is called by one thread of its own, so it may take its time. What it raises is told to the user
    once; another object is then made in its place, which begins after the last rows and events that were
    taken. So nothing is lost, and what a call took before it raised comes again. The constructor takes the
    settings and does nothing.
    """

    whole: ClassVar[bool] = False
    """Whether every object gets all rows of the run from the first one on, and writes its file anew."""

    def problems(self, run: Path) -> Iterator[str]:
        """What is wrong at the moment, before the run starts; it is told, and the run starts anyway.

        Args:
            run: the run directory, which may not be there yet.

        Raises:
            UsageError: the settings can never work, so that the run must not start.
        """
        yield from ()

    def begin(self, run: SinkRun, after: int) -> None:
        """The rows of the steps after `after` come next; later ones that it may have are void."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Take rows of metrics.jsonl, in the order of their steps."""

    def event(self, event: Row) -> None:
        """Take an event of history.jsonl (`run/history.py`)."""

    def end(self) -> None:
        """Nothing comes any more, or another object takes over: close what is open."""


def problem_of_folder(folder: Path, setting: str) -> str | None:
    """Why files can't be written in a folder that may have to be made; None if they can. Leaves nothing."""
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    reason = None
    if not place.is_dir():
        reason = os.strerror(errno.ENOTDIR)
    else:
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            reason = error.strerror
    return reason and f"{setting} {folder}: can't be written to: {place}: {reason}"


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """The metrics of a row that are numbers, without its step; names are text from a file."""
    for name, value in row.items():
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                yield name, float(value)
