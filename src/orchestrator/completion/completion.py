"""What completes answers works with, whatever kind of environment rewards them."""

import asyncio
import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.environments import AskedEnvironment, EnvironmentFailed, Unscored
from cairn.orchestrator.environments.protocol import kind_of
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.servers import GeneratingServers
from cairn.run import noted_calls
from cairn.run.noted_calls import Charge, UserCall
from cairn.run.output import quoted
from cairn.run.waiting import Backoff

# Trying an environment's calls again, before an answer counts as failed.


logger = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
"""Seconds between two tries, at most."""
SAID_IN_FULL, SAID_AGAIN = 3, (10, 100, 1_000, 10_000, 100_000)
"""How often a reason of one kind is logged in full, and with which further ones it is mentioned."""
MOST_KINDS = 1000
"""Kinds of reasons that are counted separately."""
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
        self._said = Counter[str]()
        """How often each kind of reason was logged."""

    def take(self) -> int:
        """How often something was tried again since the last call."""
        taken, self._again = self._again, 0
        return taken

    async def failure(
        self, attempt: Callable[[], Awaitable[object]], call: UserCall | None = None, about: str = ""
    ) -> str | None:
        """Await `attempt()` until it does not fail. Returns None, or why the last try failed.

        What can't pass is not tried again. A try during which the process died counts as failed, if the call
        was to blame (`run/noted_calls.py`); such a call is made again while no other such call is.

        Args:
            call: what is noted while it is in progress.
            about: what a reason says at its end if the process died.
        """
        failed = False
        before = Charge() if call is None else noted_calls.charged(call)
        made = min(before.count, self.tries - 1)
        backoff = Backoff(self.pause, LONGEST_PAUSE, failed=made)
        try:
            for number in range(made, self.tries):
                backoff.grow()
                if call is not None and (reason := self._deadly(call, about)):
                    return reason
                try:
                    async with _alone() if before.count else contextlib.nullcontext():
                        with noted_calls.in_progress(call):
                            await attempt()
                except EnvironmentFailed as error:
                    if number + 1 == self.tries or not error.passing:
                        self._say(logging.ERROR, f"given up after {number + 1} tries", error)
                        return str(error)
                    self.now += not failed
                    failed = True
                    self.reason, self.failed_at = str(error), time.monotonic()
                    again = f"try {number + 1} of {self.tries}, again in {backoff.seconds:g} s"
                    self._say(logging.WARNING, again, error)
                    await asyncio.sleep(backoff.seconds)
                    self._again += 1
                else:
                    return None
            raise AssertionError("there is at least one try")
        finally:
            self.now -= failed

    def _deadly(self, call: UserCall, about: str) -> str | None:
        """Why a call is not made again: the process has died of it too often."""
        charge = noted_calls.failed_for_good(call, self.tries)
        if charge is None:
            return None
        noted_calls.use_up(call)
        times = "once" if charge.count == 1 else f"{charge.count} times"
        reason = quoted(
            f"{call.text}: the process {charge.how} while it ran, {times}; a crash's stack is in "
            f"logs/orchestrator.log{about}"
        )
        logger.error("given up: %s", reason)
        return reason

    def _say(self, level: int, what: str, error: EnvironmentFailed) -> None:
        """Log a failed try: in full the first times that a reason of its kind comes, then now and then."""
        if isinstance(error, Unscored):
            return
        kind = f"{what} {kind_of(str(error))}"
        if kind not in self._said and len(self._said) >= MOST_KINDS:
            kind = what
        self._said[kind] += 1
        count = self._said[kind]
        if count <= SAID_IN_FULL:
            more = " (further ones of the kind are only counted)" if count == SAID_IN_FULL else ""
            logger.log(level, "%s: %s%s", what, error, more)
        elif count in SAID_AGAIN:
            logger.log(level, "%s, for the %dth time: %s", what, count, kind_of(str(error)))


@functools.cache
def _lock(_loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
    return asyncio.Lock()


def _alone() -> asyncio.Lock:
    """Held while a call is made again that may have killed the process: if it dies again, it was this one."""
    return _lock(asyncio.get_running_loop())


def tried_again(environments: Sequence[Retrying]) -> str | None:
    """What is tried again at the moment, and why, in one line; None if nothing is."""
    at_it = [one for one in environments if one.now]
    if not at_it:
        return None
    counts = " and ".join(f"{one.now} of environment {one.label!r}" for one in at_it)
    first, *more = max(at_it, key=lambda one: one.failed_at).reason.splitlines() or [""]
    reason = first if len(first) <= SHOWN_REASON and not more else f"{first[:SHOWN_REASON]}..."
    return f"rollouts that have failed are tried again: {counts}; the latest reason: {reason}"


# Work of thousands of rollouts on one event loop, between which other tasks have it.


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


Asked = TypeVar("Asked", bound=AskedEnvironment)


class PromptRefused(EnvironmentFailed):
    """A problem's messages give no usable prompt for this model and these servers; the message names it.

    That is the end of this prompt, and of no other: its answers have failed.
    """

    def __init__(self, message: str):
        super().__init__(message, passing=False)


class Completer(ABC, Generic[Asked]):
    """Completes the answers to the prompts of one environment."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environment: Asked,
        chat: ChatFormat,
        servers: GeneratingServers,
        ledger: Ledger,
        versions: Collection[str],
    ):
        """Prepare to complete groups.

        Args:
            versions: the policy versions that tokens may come from; the caller may change the set at any
                time.
        """
        self.config = config
        self.environment = environment
        self.chat = chat
        self.servers = servers
        self.ledger = ledger
        self.versions = versions
        self.retrying = Retrying(config)
        self.pacing = Pacing()

    def experts_from(self, before: int) -> int | None:
        """From which token of a context on servers are to tell the experts; None: they need not.

        Args:
            before: number of its tokens up to the end of the last answer in it. The last one of these has
                gone through no layer then.
        """
        return max(before - 1, 0) if self.config.router_replay else None

    @abstractmethod
    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """Have the answers of the group that are missing or partial generated and rewarded.

        All that is generated or rewarded is in the ledger before anything is built on it, so that a group
        that was interrupted is completed without doing any of it again.
        """
