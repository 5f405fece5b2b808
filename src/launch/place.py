"""Places of a run, which are kept filled: those of its roles (`role_place.py`) and of the trainer's ranks."""

import time
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.run.heartbeat import Watch

LOOK_SECONDS = 0.5
"""Between two looks at an occupant's signs of life."""


class Place:
    """Work that some process must always be doing, under one name in roles.json, heartbeats/ and logs/.

    That process is the place's occupant. Once it has died, or was killed because it hung, a spare or a new
    process takes the place: a restart.
    """

    def __init__(self, name: str, log: Path, run: RunDirectory):
        self.name = name
        self.log = log
        self.run = run
        self._watch: Watch | None = None
        self._look_at = 0.0

    def watch_over(
        self, pid: int, *, silence: float, standstill: float, setting: str = "--hang-timeout"
    ) -> None:
        """From now on look at the signs of life of the occupant `pid`; see `Watch` for the others."""
        self._watch = Watch(
            self.run.heartbeat(self.name), pid, silence=silence, standstill=standstill, setting=setting
        )
        self._look_at = 0.0

    def hang(self) -> str | None:
        """What is wrong with the living occupant, if anything is; call it often."""
        if self._watch is None or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()

    def note_restart(self, reason: str, how: str, *, step: int) -> None:
        """Write into the history that the occupant is replaced, at the run's newest step `step`."""
        self.run.history.restart(self.name, step=step, reason=reason, how=how)
