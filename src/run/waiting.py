"""Waiting for another process, with a deadline that names it; and how long saves and uploads took."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from cairn.run import heartbeat
from cairn.run.errors import CairnError
from cairn.run.files import read_note, write_json

T = TypeVar("T")

POLL_SECONDS = 0.005
LONGEST_LOOK = 2.0
"""Seconds that count at most between two looks; a longer gap means that this process was stopped itself."""


class DeadlinePassed(CairnError):
    """Another process did not answer in time; the message names it and the setting that allows more."""


class Patience:
    """A deadline that does not run on while this process is stopped, or the machine suspended.

    Ask `over` every second or so.
    """

    def __init__(self, seconds: float):
        self._left = seconds
        self._looked = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        now = time.monotonic()
        self._left -= min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self._left < 0


class Backoff:
    """The pause before the next try, `seconds`: none before the first, then twice the one before.

    Args:
        first: seconds before the second try.
        longest: seconds at most.
        failed: how many tries there have been already.
    """

    def __init__(self, first: float = 0.05, longest: float = 2.0, *, failed: int = 0):
        self.first, self.longest = first, longest
        self.seconds = 0.0
        for _ in range(failed):
            self.grow()

    def grow(self) -> None:
        """Another try is made."""
        self.seconds = min(max(self.first, 2 * self.seconds), self.longest)

    def spread(self) -> float:
        """The pause, or up to half of it less: by chance, so that many callers do not try all at once."""
        return self.seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """A try has succeeded."""
        self.seconds = 0.0


def wait_for(
    check: Callable[[], T | None], *, seconds: float, whom: str, setting: str, poll: float = POLL_SECONDS
) -> T:
    """Call `check` until it returns something other than None, and return that.

    Raises:
        DeadlinePassed: after `seconds`, naming `whom` we waited for and the `setting` to raise.
    """
    patience = Patience(seconds)
    with heartbeat.waiting_for(whom):
        while (value := check()) is None:
            if patience.over:
                raise DeadlinePassed(f"waited {seconds:g} s for {whom}; {setting} allows more")
            time.sleep(poll)
    return value


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also where an event loop runs already, as in a notebook: then in a thread of its own."""
    if not _loop_runs():
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "event loop") as thread:
        return thread.submit(asyncio.run, work).result()


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# How long this run's saves and uploads took: what the next ones may be expected to take.


Work = Literal["save", "upload"]

KEPT = 5
"""As many of the newest measurements count."""


@dataclass(frozen=True)
class Span:
    """The seconds that something takes at least and at most, going by the newest measurements."""

    least: float
    most: float

    def __str__(self) -> str:
        least, most = (f"{value:.1f}".removesuffix(".0") for value in (self.least, self.most))
        return f"{least} s" if least == most else f"{least} to {most} s"


class Rates:
    """The newest measurements, by kind of work; each kind has one process that notes them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def note(self, work: Work, nbytes: int, seconds: float) -> None:
        """Note that `work` on so many bytes took so long; a full disk loses the note."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            write_json(self._file(work), [*self._read(work), [float(nbytes), seconds]][-KEPT:])

    def expected(self, work: Work, nbytes: int) -> Span | None:
        """How long it would take for so many bytes; None if it was never measured.

        Fewer bytes than were measured count as many: part of the time does not depend on the size.
        """
        times = [seconds * max(1.0, nbytes / max(before, 1.0)) for before, seconds in self._read(work)]
        return Span(min(times), max(times)) if times else None

    def _read(self, work: Work) -> list[tuple[float, float]]:
        return read_note(self._file(work), list[tuple[float, float]]) or []

    def _file(self, work: Work) -> Path:
        return self.folder / f"{work}.json"
