"""Work of thousands of rollouts on one event loop, between which other tasks have it."""

import asyncio
import time

LONGEST = 0.05
"""Seconds after which other tasks have the event loop."""


class Pacing:
    """Bounds how long rollouts occupy the event loop when many of them could go on at once.

    Each awaits `turn` right before a piece of work, which should take a few milliseconds at most. They are
    served in the order in which they ask.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._since = 0.0
        """When other tasks last had the loop."""

    async def turn(self) -> None:
        """Return when it is the caller's turn: at once, unless others have waited for the loop for long."""
        async with self._one:
            if time.monotonic() - self._since > LONGEST:
                await asyncio.sleep(0)  # meanwhile further callers queue up; they have one pass each
                self._since = time.monotonic()
