"""The time of event loops, which passes when a test says so."""

import asyncio
import time
from collections.abc import Iterator

import pytest


class LoopClock:
    """What event loops take for the time: a thousandth of what passes, and what a test adds to it.

    So a machine on which nothing goes on for half a minute does not use up a deadline of a second.
    """

    def __init__(self) -> None:
        self.added = 0.0

    def now(self) -> float:
        return time.monotonic() / 1000 + self.added

    def add(self, seconds: float) -> None:
        """Let so many seconds pass. A loop that waits for nothing but the time hears of it when it wakes."""
        self.added += seconds


@pytest.fixture
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopClock]:
    """The clock of all event loops during a test."""
    clock = LoopClock()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.BaseEventLoop, "time", lambda _: clock.now())
        yield clock
