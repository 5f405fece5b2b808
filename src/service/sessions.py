"""Which clients are there, and what becomes of the models of those that went away.

A client shows by heartbeats and calls that it is there. When there has been neither for some time, the ledger
says that its session is away: its models count no more in its tenant's quota, and are saved and taken out of
memory. Nothing else changes, and whatever the client sends next ends that.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable

from cairn.service.ledger import ServiceLedger

logger = logging.getLogger(__name__)

MOST_SECONDS = 10.0
"""Between two looks at who is there."""


class SessionWatch:
    """The last sign of life of each session that is not away. For one event loop.

    Signs are in memory alone. When the service starts, each session has given one: the time in which it did
    not run counts against nobody.
    """

    def __init__(self, timeout: float, ledger: ServiceLedger, set_aside: Callable[[str], None]):
        """Start nothing yet.

        Args:
            timeout: seconds after which a session counts as away.
            set_aside: is called with each model of a session that is away.
        """
        self._timeout, self._ledger, self._set_aside = timeout, ledger, set_aside
        self._signs: dict[str, float] = {}
        """When each session gave its last sign (`time.monotonic`)."""
        self._changing = asyncio.Lock()
        """Held while the ledger is told that a session goes or comes back."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to look."""
        self._signs = dict.fromkeys(self._ledger.present_sessions(), time.monotonic())
        self._task = asyncio.create_task(self._look())

    async def end(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def sign(self, session: str) -> None:
        """Note a sign of life; a session that was away is back when this returns. Empty: of no session."""
        if not session:
            return
        if session not in self._signs:
            async with self._changing:
                await asyncio.to_thread(self._ledger.return_session, session)
                self._signs[session] = time.monotonic()
        self._signs[session] = time.monotonic()

    def finished(self, session: str) -> None:
        """A session has come to its end."""
        self._signs.pop(session, None)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(self._timeout / 4, MOST_SECONDS))
            try:
                await self.leave_silent(time.monotonic())
            except sqlite3.Error as error:  # such as a full disk; the next look tries again
                logger.warning("the ledger can't be told which clients are away: %s", error)

    async def leave_silent(self, now: float) -> None:
        """Note as away who has given no sign for long enough at `now`, and waits for no answer."""
        for session in list(self._signs):
            async with self._changing:
                sign = self._signs.get(session, now)
                if now - sign <= self._timeout:
                    continue
                del self._signs[session]  # whoever comes now waits until the ledger knows
                try:
                    models = await asyncio.to_thread(self._ledger.leave_session, session)
                except sqlite3.Error:
                    self._signs[session] = sign
                    raise
                if models is None:
                    self._signs[session] = now
                    continue
            logger.info("session %s is away, without a sign of life for %g s", session, now - sign)
            for model in models:
                self._set_aside(model)
