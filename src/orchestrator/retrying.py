"""Trying an environment's calls again, before an answer counts as failed."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import EnvironmentFailed

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
"""Seconds between two tries, at most."""
SHOWN_REASON = 200
"""Characters of a reason that a display has room for."""


class Retrying:
    """Tries what is asked of one environment as often, and with such pauses, as the configuration says."""

    def __init__(self, config: OrchestratorConfig):
        self.label = config.environment.called
        self.tries = 1 + config.reward_retries
        self.pause = config.reward_retry_seconds
        self.now = 0
        """How many rollouts have failed, and are to succeed with one of their next tries."""
        self.reason = ""
        """Why a try failed the last time that it was not a rollout's last."""
        self.failed_at = 0.0
        """When that was (`time.monotonic`)."""
        self._again = 0

    def take(self) -> int:
        """How often something was tried again since the last call."""
        taken, self._again = self._again, 0
        return taken

    async def failure(self, attempt: Callable[[], Awaitable[object]]) -> str | None:
        """Await `attempt()` until it does not fail. Returns None, or why the last try failed."""
        failed = False
        try:
            for number in range(self.tries):
                try:
                    await attempt()
                except EnvironmentFailed as error:
                    if number + 1 == self.tries:
                        logger.error("given up after %d tries: %s", self.tries, error)
                        return str(error)
                    self.now += not failed
                    failed = True
                    self.reason, self.failed_at = str(error), time.monotonic()
                    pause = min(self.pause * 2**number, LONGEST_PAUSE)
                    logger.warning("try %d of %d, again in %g s: %s", number + 1, self.tries, pause, error)
                    await asyncio.sleep(pause)
                    self._again += 1
                else:
                    return None
            raise AssertionError("there is at least one try")
        finally:
            self.now -= failed


def tried_again(environments: Sequence[Retrying]) -> str | None:
    """What is tried again at the moment, and why, in one line; None if nothing is."""
    at_it = [one for one in environments if one.now]
    if not at_it:
        return None
    counts = " and ".join(f"{one.now} of environment {one.label!r}" for one in at_it)
    first, *more = max(at_it, key=lambda one: one.failed_at).reason.splitlines() or [""]
    reason = first if len(first) <= SHOWN_REASON and not more else f"{first[:SHOWN_REASON]}..."
    return f"rollouts that have failed are tried again: {counts}; the latest reason: {reason}"
