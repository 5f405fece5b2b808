"""Trying an environment's calls again, before an answer counts as failed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import EnvironmentFailed

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
"""Seconds between two tries, at most."""


class Retrying:
    """Tries as often, and with such pauses, as the configuration says."""

    def __init__(self, config: OrchestratorConfig):
        self.tries = 1 + config.reward_retries
        self.pause = config.reward_retry_seconds

    async def failure(self, attempt: Callable[[], Awaitable[object]]) -> str | None:
        """Await `attempt()` until it does not fail. Returns None, or why the last try failed."""
        for number in range(self.tries):
            try:
                await attempt()
            except EnvironmentFailed as error:
                if number + 1 == self.tries:
                    logger.error("given up after %d tries: %s", self.tries, error)
                    return str(error)
                pause = min(self.pause * 2**number, LONGEST_PAUSE)
                logger.warning("try %d of %d, again in %g s: %s", number + 1, self.tries, pause, error)
                await asyncio.sleep(pause)
            else:
                return None
        raise AssertionError("there is at least one try")
