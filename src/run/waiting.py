"""Waiting for another process, with a deadline that names it."""

import time
from collections.abc import Callable
from typing import TypeVar

from cairn.run import heartbeat
from cairn.run.errors import CairnError

T = TypeVar("T")

POLL_SECONDS = 0.005


class DeadlinePassed(CairnError):
    """Somebody did not answer in time; the message names who and the setting that allows more."""


def wait_for(
    check: Callable[[], T | None], *, seconds: float, whom: str, setting: str, poll: float = POLL_SECONDS
) -> T:
    """Call `check` until it returns something other than None, and return that.

    Raises:
        DeadlinePassed: after `seconds`, naming `whom` we waited for and the `setting` to raise.
    """
    deadline = time.monotonic() + seconds
    with heartbeat.waiting_for(whom):
        while (value := check()) is None:
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"waited {seconds:g} s for {whom}; {setting} allows more")
            time.sleep(poll)
    return value
