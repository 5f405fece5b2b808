"""The slot of a background job, such as exports or uploads: unlike a role's, its death ends no run.

As long as nobody waits for it, the job leaves processors and disks to training.
"""

import contextlib
import time
from abc import abstractmethod

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_jobs import StepJob
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.launch.supervise.slot import RoleProcess, Slot
from cairn.run.directory import RunDirectory
from cairn.run.files import read_note
from cairn.run.heartbeat import Beat
from cairn.run.processes import ProcessorUse, bring_forward, put_in_background

PRIORITY_SECONDS = 1.0
"""Between two looks at whether a process has the right priority."""


class JobSlot(Slot):
    """Keeps a process at a background job until the run ends.

    A process that dies or hangs is replaced. After too many deaths without progress nothing more is done,
    which is said at once and at the end of the run.

    While the run trains, the process has the lowest priority from the moment that it has started up, unless
    it is behind. It has normal priority once somebody waits for it, because the run ends or is to stop, and
    after a hang, which may have been a want of processors.
    """

    def __init__(self, name: str, run: RunDirectory, config: RunConfig, job: StepJob):
        super().__init__(name, run, config)
        self.job = job
        self.store = CheckpointStore(run.checkpoints)
        self._awaited = False
        """Whether somebody waits for it."""
        self._look_at_priority = 0.0
        self.interrupted = False
        """Whether somebody did not want to wait for its end."""
        self._begin()

    @abstractmethod
    def first_missing(self) -> int:
        """The step that the history names if nothing more is done in this attempt of the run."""

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
        self._prioritise(awaited=stopping)
        if (how := self._look()) is None:
            return
        if self.exit_code == 0:
            self.run.set_role(self.name, "done", self.pid)
            self.ended = True
            return
        if self.exit_code is None:  # it hangs
            self._awaited = True
        self._process.kill()
        self.run.set_role(self.name, "failed", self.pid)
        if not self._plan_restart(self.job.newest_done()):
            self.ended = True
            reason = f"the {self.name} {how} too often; see {self.log}"
            self.job.give_up(reason)
            self.job.note_missed(self.run.history, self.first_missing(), reason)
            return
        self.run.history.restart(self.name, step=step, reason=how, how="is started again")

    def stop(self) -> None:
        """Kill the process; what it was doing is begun again, or gone on with, by the next attempt."""
        if self.exit_code is None:
            self._process.kill()
            self.run.set_role(self.name, "stopped", self.pid)

    def _start(self) -> RoleProcess:
        process = RoleProcess(self.name, self.run.path, self.log, local_ray=True)
        self._low = False
        """Whether it is in the background."""
        self._use: ProcessorUse | None = None
        """What it has had since it was brought forward, if its niceness stayed that of the background."""
        allowed = self.config.hang_timeout  # it runs when nobody else does, so it may fall silent
        self.watch_over(process.pid, silence=allowed, standstill=allowed)
        return process

    def await_it(self) -> None:
        """From now on somebody waits for the work, so that it has normal priority."""
        self._prioritise(awaited=True)

    def _prioritise(self, *, awaited: bool) -> None:
        """Give the process the priority that it should have now.

        Without privileges its niceness stays high once it was. Then, if somebody waits and it starves,
        another process goes on with the work: this is no death.
        """
        at_once = awaited and not self._awaited
        self._awaited = self._awaited or awaited
        if time.monotonic() < self._look_at_priority and not at_once:
            return
        self._look_at_priority = time.monotonic() + PRIORITY_SECONDS
        if self.exit_code is not None:
            return
        pid, normal = self.pid, self._awaited or self._is_behind()
        if self._low and normal:
            self._use = None if bring_forward(pid) else ProcessorUse(pid)
            self._low = False
        elif not self._low and not normal and self._has_started():
            put_in_background(pid)
            self._low = True
        elif self._awaited and self._use and self._use.starves():
            self._process.kill()
            self._begin()

    def _is_behind(self) -> bool:
        with contextlib.suppress(OSError, CheckpointError):
            return self.job.is_behind()
        return False

    def _has_started(self) -> bool:
        beat = read_note(self.run.heartbeat(self.name), Beat)
        return beat is not None and beat.pid == self.pid and beat.marks > 0
