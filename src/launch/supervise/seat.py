"""Places of a run, which are kept filled: its roles (`role.py`) and trainer ranks (`rank.py`)."""

import time
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.run.heartbeat import Watch

LOOK_SECONDS = 0.5
"""Seconds between two checks of an occupant's heartbeat."""


class Seat:
    """Work that some process must always be doing, with one name in roles.json, heartbeats/ and logs/.

    The process that does it is the occupant of the place. When the occupant dies, or is killed because it
    hangs, a spare or a new process takes the place. That is a restart.
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
        """Watch the heartbeat of the occupant with process id `pid`; see `Watch` for the arguments."""
        path = self.run.heartbeat(self.name)
        self._watch = Watch(
            path, pid, silence=silence, standstill=standstill, setting=setting, lengthy=lengthy
        )
        self._look_at = 0.0

    def hang(self) -> str | None:
        """Why the living occupant counts as hung; None if it does not. Call it often."""
        if self._watch is None or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()

    def note_restart(self, reason: str, how: str, *, step: int) -> None:
        """Record in history.jsonl that the occupant is replaced; `step` is the run's newest step."""
        self.run.history.restart(self.name, step=step, reason=reason, how=how)
