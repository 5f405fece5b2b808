"""A place for work beside the run, such as uploads: unlike a role's, its death ends no run."""

import time
from collections.abc import Callable
from typing import Protocol

from cairn.config.kinds import RunConfig
from cairn.launch.place import Place
from cairn.launch.restarts import RestartRule
from cairn.launch.role_process import RoleProcess
from cairn.run.directory import RunDirectory

POLL_SECONDS = 0.05


class Work(Protocol):
    """What a process does beside a run."""

    name: str
    """Of the process, in roles.json, heartbeats/ and logs/."""

    def newest_done(self) -> int:
        """The newest step that is done; 0 if none is. The process makes progress as long as it grows."""
        ...

    def give_up(self, step: int, reason: str) -> None:
        """Record, when the run's newest step is `step`, that the process died too often."""
        ...

    def is_done_for(self, step: int) -> bool:
        """Whether nothing waits any more of a run that was stopped after `step`."""
        ...


class BackgroundPlace(Place):
    """Keeps a process at its work until the run ends.

    A process that dies or hangs is replaced. After too many deaths without progress nothing more is done.
    """

    def __init__(self, run: RunDirectory, config: RunConfig, work: Work):
        super().__init__(work.name, run.logs / f"{work.name}.log", run)
        self.config = config
        self.work = work
        self._rule = RestartRule(config.max_restarts)
        self._restart_at: float | None = None
        self.ended = False
        """Whether the work is done or given up."""
        self.interrupted = False
        """Whether somebody did not want to wait for its end."""
        self._fill()

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Notice that the process ended or hangs, and start another one unless the run is stopping.

        Args:
            step: the run's newest step.
        """
        if self.ended:
            return
        if self._restart_at is not None:
            if time.monotonic() >= self._restart_at and not stopping:
                self._fill()
            return
        code = self._occupant.exit_code
        if code is None:
            if (hang := self.hang()) is None:
                return
            how = f"hung ({hang})"
        elif code == 0:
            self.run.set_role(self.name, "done", self._occupant.pid)
            self.ended = True
            return
        else:
            how = f"died (exit code {code})"
        self._occupant.kill()
        self.run.set_role(self.name, "failed", self._occupant.pid)
        wait = self._rule.wait_after_death(self.work.newest_done())
        if wait is None:
            self.ended = True
            self.work.give_up(step, f"the {self.name} {how} too often; see {self.log}")
            return
        self.note_restart(how, "is started again", step=step)
        self._restart_at = time.monotonic() + wait

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Wait until all is done or given up, once the run's last step is saved.

        Args:
            update: called repeatedly, to show what the process does.
            interrupted: whether nobody wants to wait any longer.
        """
        while not self.ended:
            if interrupted():
                self.interrupted = True
                return
            self.look_after(self.config.max_steps, stopping=False)
            update()
            time.sleep(POLL_SECONDS)

    def finish_stopped(
        self, step: int, seconds: float, update: Callable[[], None], interrupted: Callable[[], bool]
    ) -> None:
        """Wait, but only for so long, until nothing waits of a run that was stopped after `step`."""
        end = time.monotonic() + seconds
        while not self.ended and not self.work.is_done_for(step):
            if interrupted() or time.monotonic() > end:
                return
            self.look_after(step, stopping=False)
            update()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Kill the process; what it was doing is begun again, or gone on with, by the next attempt."""
        if self._occupant.exit_code is None:
            self._occupant.kill()
            self.run.set_role(self.name, "stopped", self._occupant.pid)

    def _fill(self) -> None:
        self._restart_at = None
        self._occupant = RoleProcess(self.name, self.run.path, self.log, local_ray=True)
        allowed = self.config.hang_timeout  # it runs when nobody else does, so it may fall silent
        self.watch_over(self._occupant.pid, silence=allowed, standstill=allowed)
