"""Waiting for another process, with a deadline that names it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cairn.run import heartbeat
from cairn.run.errors import CairnError

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
