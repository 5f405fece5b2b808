"""Whose turn it is, where servers share a GPU with the trainer; nobody takes turns where they do not.

The turn is the trainer's from the moment that a batch is shipped and all servers sleep, until it announces
the policy of the newest batch, or one before that is to be evaluated. The note that says so
(`PolicyVersions.hand_over`) is written when all servers sleep and removed before they are woken, so that a
role that is started anew finds out by reading it.
"""

import asyncio
import logging
from collections.abc import Callable

from cairn.orchestrator.state import OrchestratorState

logger = logging.getLogger(__name__)

LAST_SLEEP = 30
"""Seconds that the servers get to fall asleep at the end of the run."""


class Sharing:
    """When servers work and when they sleep.

    This class itself is for a trainer that computes on other GPUs: servers serve every policy, and never
    sleep, so that clients may ask them after the run, too.
    """

    def __init__(self) -> None:
        self.serving = asyncio.Lock()
        """Locked from asking `wants` until the servers have the policy, and have proven it."""

    def wants(self, step: int, *, last: bool = False) -> bool:
        """Whether the servers are given the policy of `step`; `last`: the run ends there."""
        return True

    def before_serving(self) -> None:
        """Servers are about to be given a policy."""

    async def hand_over(self) -> None:
        """Called when a batch may have been shipped, and in the beginning."""

    async def sleep_at_end(self) -> None:
        """Nothing is asked of the servers any more, which may have been given the last policy."""

    def end(self) -> None:
        """No policy will be served any more."""


class TakingTurns(Sharing):
    """The servers sleep while the trainer has a batch, and are woken for the policy of the newest batch."""

    def __init__(self, state: OrchestratorState, evaluation_due: Callable[[int], bool]):
        super().__init__()
        self.state = state
        self._evaluation_due = evaluation_due
        self._versions = state.run.versions

    def wants(self, step: int, *, last: bool = False) -> bool:
        """Whether prompts will be sampled from the policy of `step`: no later batch is shipped.

        Also if it is to be evaluated and the note does not let the trainer go on from it: the orchestrator
        may have died in the evaluation, in which it had shipped the next batch. None are sampled from the
        last policy, for which servers are woken only if it is to be evaluated.
        """
        if last or step >= self.state.shipped.newest.step:
            return not last
        return self._evaluation_due(step) and self._versions.trainers_turn(self.state.attempt) is None

    def before_serving(self) -> None:
        """The trainer's turn is over: it has announced what it was to make, or has nothing to train on."""
        self._versions.take_back()

    async def hand_over(self) -> None:
        """If the trainer has not announced the policy of the newest batch, have all servers sleep and say so.

        The note has it stop at a policy that is to be evaluated, also if there are batches beyond it.

        Raises:
            ServerUnavailable: a server does not sleep.
        """
        if self._until() is None:
            return
        async with self.serving:  # after a restart, a batch may be ready before the servers are
            until = self._until()
            if until is not None and until > self._announced():
                await self.state.servers.sleep()
                self._versions.hand_over(self.state.attempt, until)

    def _until(self) -> int | None:
        """The step that the note is to name as the trainer's last; None if it does, or there is no batch."""
        newest, announced = self.state.shipped.newest.step, self._announced()
        if newest <= announced:
            return None
        turn = self._versions.handed_over(self.state.attempt)
        if turn is not None and (turn.until is None or turn.until >= newest):
            return None
        until = next((step for step in range(announced, newest) if self._evaluation_due(step)), newest)
        return until if turn is None or turn.until is None or turn.until < until else None

    def _announced(self) -> int:
        attempt = self.state.attempt
        return max(self._versions.all_announced(attempt), default=attempt.start_step)

    async def sleep_at_end(self) -> None:
        """If servers were woken for the last policy, have them sleep, and let a trainer take steps again.

        One that does not fall asleep in time is dead, or soon will be: the run ends.
        """
        if self._versions.handed_over(self.state.attempt) is not None:
            return
        try:
            await asyncio.wait_for(self.state.servers.sleep(), LAST_SLEEP)
        except Exception as error:
            logger.warning("the servers do not sleep at the end of the run: %s", error)
        self._versions.hand_over(self.state.attempt, until=None)

    def end(self) -> None:
        """Sleeping servers sleep on: a trainer that dies in its last save takes its last steps again."""
        if self._versions.handed_over(self.state.attempt):
            self._versions.hand_over(self.state.attempt, until=None)


def make_sharing(state: OrchestratorState, evaluation_due: Callable[[int], bool]) -> Sharing:
    """As the configuration says.

    Args:
        evaluation_due: whether the policy of a step is to be evaluated, and was not yet.
    """
    return TakingTurns(state, evaluation_due) if state.config.colocated else Sharing()
