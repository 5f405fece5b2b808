"""A slot that some process must always fill, and when a dead process is replaced."""

import time
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.run.heartbeat import Watch

LOOK_SECONDS = 0.5
"""Seconds between two checks of a heartbeat."""


class Slot:
    """Work that some process must always be doing, with one name in roles.json, heartbeats/ and logs/.

    When the process in the slot dies, or is killed because it hangs, a spare or a new process takes over: a
    restart.
    """

    def __init__(self, name: str, log: Path, run: RunDirectory):
        self.name = name
        self.log = log
        self.run = run
        self._watch: Watch | None = None
        self._look_at = 0.0

    def watch_over(
        self,
        pid: int,
        *,
        silence: float,
        standstill: float,
        setting: str = "--hang-timeout",
        lengthy: float | None = None,
    ) -> None:
        """Watch the heartbeat of the process `pid`; see `Watch` for the arguments."""
        path = self.run.heartbeat(self.name)
        self._watch = Watch(
            path, pid, silence=silence, standstill=standstill, setting=setting, lengthy=lengthy
        )
        self._look_at = 0.0

    def hang(self) -> str | None:
        """Why the living process counts as hung; None if it does not. Call it often."""
        if self._watch is None or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()

    def note_restart(self, reason: str, how: str, *, step: int) -> None:
        """Record in history.jsonl that the process is replaced; `step` is the run's newest step."""
        self.run.history.restart(self.name, step=step, reason=reason, how=how)


# When to restart a dead process and when to give up: one rule for roles and ranks.


LONGEST_WAIT = 30.0
MOST_EXCUSED = 200
"""Restarts without a new step that don't count because a call of user code was to blame: each such call has a
bounded number of tries, and an environment too many of whose prompts fail ends the run."""


class RestartRule:
    """Restart at once, then after 4, 8, 16 and 30 seconds; give up if the restarts bring no new step.

    Args:
        max_restarts: restarts without a new step after which it gives up.
    """

    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self._fruitless = 0
        self._excused, self._excused_at = 0, -1
        self._step = -1

    def wait_after_death(self, step: int, *, excused: bool = False) -> float | None:
        """Seconds to wait before the restart, or None to give up; `step` is the newest finished step.

        Recomputing a step is no progress.

        Args:
            excused: a call of user code was to blame, for which the death counts as a failed try.
        """
        if step > self._excused_at:
            self._excused, self._excused_at = 0, step
        if excused and self._excused < MOST_EXCUSED:
            self._excused += 1
            return 0.0
        self._fruitless = 1 if step > self._step else self._fruitless + 1
        self._step = max(self._step, step)
        if self._fruitless > self.max_restarts:
            return None
        return 0.0 if self._fruitless == 1 else min(2.0**self._fruitless, LONGEST_WAIT)
