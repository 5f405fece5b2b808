"""How far a long copy or conversion has come: bars on a terminal, and plain lines elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator

from cairn.run.output import printable

Stage = Callable[[str, int], Callable[[int], None]]
"""Begins a stage of so many bytes; returns what is told how many more are done, by any thread."""
FIRST_LINE = 2.0
"""Seconds; a stage that takes less prints no plain lines."""
EACH_LINE = 10.0
"""Seconds between two plain lines of a stage."""


def no_progress(stage: str, total: int) -> Callable[[int], None]:
    """A `Stage` that shows nothing."""
    return lambda count: None


@contextlib.contextmanager
def progress_bars() -> Generator[Stage]:
    """A `Stage` that shows name, bytes and rate of each stage on standard error."""
    if not sys.stderr.isatty():
        yield lines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    # rich takes a while to import.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def begin(stage: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(escape(printable(stage)), total=total)
            return lambda count: progress.advance(task, count)

        yield begin


def lines(say: Callable[[str], None], first: float = FIRST_LINE, every: float = EACH_LINE) -> Stage:
    """A `Stage` that says how far it is, in lines; a stage that said anything also says when it is done.

    Args:
        first: seconds from the begin of a stage until its first line.
        every: seconds between two lines of a stage.
    """

    def begin(stage: str, total: int) -> Callable[[int], None]:
        began = time.monotonic()
        due = began + first
        done = 0
        ended = False
        several = threading.Lock()

        def advance(count: int) -> None:
            nonlocal due, done, ended
            with several:
                done += count
                now = time.monotonic()
                ends = done >= total and now >= began + first
                if ended or (now < due and not ends):
                    return
                due, ended = now + every, ends
                say(f"{printable(stage)}: {in_words(done, total, now - began)}")

        return advance

    return begin


def in_words(done: int, total: int, seconds: float) -> str:
    """How far a stage is that has taken so many seconds, such as `1.2 of 5.0 GB, 310 MB/s`."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if total >= u), (1e3, "kB"))
    return f"{done / unit:.1f} of {total / unit:.1f} {name}, {done / 1e6 / max(seconds, 1e-3):.0f} MB/s"
