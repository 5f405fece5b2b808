"""Places for work beside the run, such as exports and uploads: unlike a role's, their death ends no run."""

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence

from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.launch.place import Place
from cairn.launch.restarts import RestartRule
from cairn.launch.role_process import RoleProcess
from cairn.run.directory import RunDirectory

POLL_SECONDS = 0.05


class BackgroundPlace(Place):
    """Keeps a process at work beside the run, until the run ends.

    A process that dies or hangs is replaced. After too many deaths without progress nothing more is done,
    which is said at once and at the end of the run.
    """

    def __init__(self, name: str, run: RunDirectory, config: RunConfig):
        super().__init__(name, run.logs / f"{name}.log", run)
        self.config = config
        self.store = CheckpointStore(run.checkpoints)
        self._rule = RestartRule(config.max_restarts)
        self._restart_at: float | None = None
        self.ended = False
        """Whether the work is done or given up."""
        self.interrupted = False
        """Whether somebody did not want to wait for its end."""
        self._fill()

    @abstractmethod
    def newest_done(self) -> int:
        """The newest step that is done; 0 if none is. The process makes progress as long as it grows."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Record that nothing more is done in this attempt of the run."""

    @abstractmethod
    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that wait for this work; see `retention.Spare`."""

    @abstractmethod
    def conclude(self, code: int) -> int:
        """Say how it ended, and return the launcher's exit code; so far it would be `code`.

        Raises:
            RoleFailed: the run is complete, but this work is not.
        """

    def still_wanted(self) -> bool:
        """Whether a run that was stopped should wait a little for this work."""
        return False

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Notice that the process ended or hangs, and start another one, unless the run is stopping.

        Args:
            step: the run's newest step.
        """
        if self.ended or (stopping and not self.still_wanted()):
            return
        if self._restart_at is not None:
            if time.monotonic() >= self._restart_at:
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
        wait = self._rule.wait_after_death(self.newest_done())
        if wait is None:
            self.ended = True
            self.give_up(f"the {self.name} {how} too often; see {self.log}")
            return
        self.note_restart(how, "is started again", step=step)
        self._restart_at = time.monotonic() + wait

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


class Beside:
    """All the work beside a run."""

    def __init__(self, config: RunConfig, places: Sequence[BackgroundPlace]):
        self.config = config
        self.places = places

    def look_after(self, step: int, *, stopping: bool) -> None:
        """See `BackgroundPlace.look_after`."""
        for place in self.places:
            place.look_after(step, stopping=stopping)

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Wait until all is done or given up, once the run's last step is saved; then apply retention.

        Args:
            update: called repeatedly, to show what is being done.
            interrupted: whether nobody wants to wait any longer.
        """
        while working := [place for place in self.places if not place.ended]:
            if interrupted():
                for place in working:
                    place.interrupted = True
                return
            self.look_after(self.config.max_steps, stopping=False)
            update()
            time.sleep(POLL_SECONDS)
        if self.places and self.config.ckpt:
            apply_retention(self.places[0].store, self.config.ckpt, self._spare)

    def finish_stopped(
        self, step: int, seconds: float, update: Callable[[], None], interrupted: Callable[[], bool]
    ) -> None:
        """Wait, but only for so long, for what a run that was stopped after `step` should not lose."""
        end = time.monotonic() + seconds
        while any(not place.ended and place.still_wanted() for place in self.places):
            if interrupted() or time.monotonic() > end:
                return
            self.look_after(step, stopping=True)
            update()
            time.sleep(POLL_SECONDS)

    def conclude(self, code: int) -> int:
        """Say how all of it ended; see `BackgroundPlace.conclude`."""
        for place in self.places:
            code = place.conclude(code)
        return code

    def stop(self) -> None:
        """Kill the processes."""
        for place in self.places:
            place.stop()

    def _spare(self, unkept: Collection[int]) -> Collection[int]:
        return {step for place in self.places for step in place.spare(unkept)}
