"""How much of the processors a process gets of what it asks for."""

import time

from cairn.run.processes import processor_times

WINDOW_SECONDS = 2.0
"""The time that a judgement is made of, at least."""
STARVED = 10
"""Who waits for a processor so many times as long as it has one starves; own threads cause less."""
NOTICED = 0.1
"""Who waits for less than this share of the time has hardly asked for a processor, and does not starve."""


class ProcessorUse:
    """Follows how long the threads of a process have processors, and how long they wait for them."""

    def __init__(self, process: int):
        self.process = process
        self._begin()

    def starves(self) -> bool:
        """Whether the process has starved since the last judgement; call it every second or so."""
        seconds = time.monotonic() - self._since
        if seconds < WINDOW_SECONDS:
            return False
        times = self._times_since()
        self._begin()
        had, waited = (sum(spent[i] for spent in times) for i in (0, 1))
        return waited > max(STARVED * had, NOTICED * seconds * 1e9)

    def longest_wait(self) -> float:
        """Seconds that one thread, the one with most of them, has waited for a processor."""
        return max((waited for _, waited in self._times_since()), default=0) / 1e9

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._before = processor_times(self.process)

    def _times_since(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for thread, (had, waited) in processor_times(self.process).items():
            had_before, waited_before = self._before.get(thread, (0, 0))
            found.append((had - had_before, waited - waited_before))
        return found
