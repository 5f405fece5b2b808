"""Where the time of an environment's calls goes: what they take, and how long they waited for a thread."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cairn.run import spans


@dataclass(frozen=True)
class CallSeconds:
    """What calls have taken, in seconds.

    calls: their number. running: the sum of what they took once they ran. queued: the sum of what they waited
    before that. under_way: the time in which at least one was running or waiting.
    """

    calls: int = 0
    running: float = 0.0
    queued: float = 0.0
    under_way: float = 0.0


class CallTimes:
    """Adds up the calls that answers wait for: rewards, steps of worlds, tools. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._at_once = 0
        self._marked = clock()
        self._busy_since = 0.0
        self._taken = CallSeconds()

    @contextlib.contextmanager
    def call(self) -> Iterator[Callable[[], None]]:
        """Within, a call waits and then runs; what is returned is to be called when it begins to run."""
        begun, started = self._clock(), list[float]()
        self._change(+1)
        try:
            yield lambda: started.append(self._clock())
        finally:
            now = self._clock()
            start = started[0] if started else now
            self._change(-1, calls=1, queued=start - begun, running=now - start)

    def _change(self, more: int, *, calls: int = 0, queued: float = 0.0, running: float = 0.0) -> None:
        with self._lock:
            now, taken = self._clock(), self._taken
            passed = now - self._marked if self._at_once else 0.0
            self._marked, before = now, self._at_once
            self._at_once += more
            if not before and more:
                self._busy_since = time.time()
            elif before and not self._at_once:
                spans.add("environments", "rewarding", self._busy_since)
            self._taken = CallSeconds(
                taken.calls + calls,
                taken.running + running,
                taken.queued + queued,
                taken.under_way + passed,
            )

    def take(self) -> CallSeconds:
        """What was taken since the last call; of calls that go on, only the time until now."""
        self._change(0)
        with self._lock:
            taken, self._taken = self._taken, CallSeconds()
        return taken


def call_metrics(taken: Iterable[CallSeconds]) -> dict[str, float]:
    """Metrics of the calls of all environments, in seconds; none if there were no calls.

    Returns:
        `time/reward`: mean of what a call took. `time/reward_queue`: mean of what it waited for a thread.
        `time/rewards`: the time in which calls were under way, of the environment where that is longest.
    """
    each = list(taken)
    longest = max((one.under_way for one in each), default=0.0)
    if not (calls := sum(one.calls for one in each)):
        return {"time/rewards": longest} if longest else {}
    return {
        "time/reward": sum(one.running for one in each) / calls,
        "time/reward_queue": sum(one.queued for one in each) / calls,
        "time/rewards": longest,
    }
