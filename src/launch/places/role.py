"""The place of a role: its process, the standby that may take over, and when to restart it."""

import time

from cairn.config.kinds import RunConfig
from cairn.launch.exits import (
    END_SERVER,
    EXIT_CRASHED,
    EXIT_DAMAGED,
    EXIT_LOST,
    EXIT_STOPPED,
    EXIT_USAGE,
    STANDBY,
    WORKING,
    RoleFailed,
)
from cairn.launch.places.place import Place
from cairn.launch.places.restarts import RestartRule
from cairn.launch.places.role_process import RoleProcess
from cairn.launch.process import log_end
from cairn.launch.start import StartDamaged
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError

STOP_SECONDS = 20
"""Seconds that a server has to exit."""
OWN_WORKERS = ("trainer_rank", "trainer_spare")
"""Prefixes, in roles.json, of worker names that die with the trainer's driver."""


class RolePlace(Place):
    """Keeps a role filled until the run ends; constructing it starts the first process."""

    def __init__(self, name: str, run: RunDirectory, config: RunConfig, *, local_ray: bool):
        super().__init__(name, run.logs / f"{name}.log", run)
        self.config = config
        self.local_ray = local_ray
        """Whether a Ray cluster that the role starts serves this machine only."""
        self.ended = False
        """Whether the role's work is done or given up."""
        self.lost: str | None = None
        """How the occupant died, if the run was stopping and so it was not replaced."""
        self._rule = RestartRule(config.max_restarts)
        self._restart_at: float | None = None
        """When to start the next occupant (`time.monotonic`); None if there is one."""
        self._restarted = False
        self._spare: RoleProcess | None = None
        """The standby."""
        self._fill(0)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the newest occupant; None while it lives."""
        return self._occupant.exit_code

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Notice that the occupant ended or hangs, and restart it unless the run is stopping.

        `step` is the run's newest step.

        Raises:
            RoleFailed: it reported an error that would recur, or it died too often.
            UsageError: it refused a setting or the data; a server only at its first start.
            StartDamaged: it is the trainer, and the checkpoint that it must resume from is damaged.
        """
        if self.ended or self.lost:
            return
        if self._restart_at is not None:
            if stopping:
                self._lose("died")
            elif time.monotonic() >= self._restart_at:
                self._fill(step)
            return
        code = self.exit_code
        if code is None:
            hang = self.hang()
            if hang is not None:
                self._occupant.kill()
                self._replace(f"hung ({hang})", step, stopping=stopping)
            elif not stopping:
                self._keep_spare(step)
        elif self.name in WORKING and code in (0, EXIT_STOPPED, EXIT_LOST):
            self.ended = True
        elif code == EXIT_USAGE and (self.name in WORKING or not self._restarted):
            raise UsageError(self._occupant.last_words())
        elif code == EXIT_DAMAGED and (damaged := StartDamaged.heard(self._occupant.last_words())):
            raise damaged
        else:
            self._occupant.kill()  # else its old workers run beside the new ones for a while
            crashed = code < 0 or code == EXIT_CRASHED or self.name not in WORKING
            reason = f"died (exit code {code})"
            if code == EXIT_CRASHED:
                reason = f"failed ({self._occupant.last_words()})"
            self._replace(reason, step, for_good=not crashed, stopping=stopping)

    def stop(self) -> None:
        """End the occupant: a server first gets its signal; then the whole session is killed."""
        if self._spare is not None:
            self._spare.kill()
        if self.exit_code is not None:
            self._occupant.kill()
            return
        if self.name not in WORKING:
            self._occupant.signal(END_SERVER)
        if self.name in WORKING or not self._occupant.wait(STOP_SECONDS):
            self._occupant.kill()
        state = "stopped" if self.exit_code == 0 else "failed"
        self.run.set_role(self.name, state, self._occupant.pid)

    def _lose(self, how: str) -> None:
        """Leave the place empty, because the run is stopping."""
        self._restart_at = None
        self.ended = self.name in WORKING
        self.lost = f"{self.name} {how}"

    def _replace(self, reason: str, step: int, *, for_good: bool = False, stopping: bool) -> None:
        """Schedule a replacement for the dead occupant by the restart rule, unless the run is stopping.

        Raises:
            RoleFailed: the rule gives up.
        """
        self.run.set_role(self.name, "failed", self._occupant.pid)
        if self.name == "trainer":
            self.run.end_roles("failed", *OWN_WORKERS)
        if stopping and not (for_good and self.name == "trainer"):
            self._lose(reason)
            return
        wait = None if for_good else self._rule.wait_after_death(step)
        if wait is None:
            raise RoleFailed(f"{self.name} {reason}; the end of {self.log}:\n{log_end(self.log)}")
        how = "is replaced by its standby" if self._has_spare() else "is started again"
        self.note_restart(reason, how, step=step)
        self._restart_at = time.monotonic() + wait
        self._restarted = True

    def _fill(self, step: int) -> None:
        """Fill the place with the spare or a new process."""
        self._restart_at = None
        if self._spare is not None and self._has_spare():
            self._occupant = self._spare
            self._occupant.begin()
        else:
            self._occupant = self._start()
        self._spare = None
        self._had_spare = not (self.config.standby and self.name in STANDBY)
        self._filled_at_step = step
        silence, lengthy = self.config.heartbeat_timeout, self.config.hang_timeout
        if self.name in WORKING:
            self.watch_over(self._occupant.pid, silence=silence, standstill=lengthy)
        else:  # a server that does not answer counts as hung, unless it is being given weights
            self.watch_over(
                self._occupant.pid,
                silence=silence,
                standstill=silence,
                setting="--heartbeat-timeout",
                lengthy=lengthy,
            )

    def _has_spare(self) -> bool:
        return self._spare is not None and self._spare.exit_code is None

    def _keep_spare(self, step: int) -> None:
        """Start a spare, one per occupant, once the occupant has come so far that this doesn't disturb it."""
        if not self._had_spare and step > self._filled_at_step:
            self._had_spare = True
            self._spare = self._start(standby=True)

    def _start(self, *, standby: bool = False) -> RoleProcess:
        return RoleProcess(self.name, self.run.path, self.log, local_ray=self.local_ray, standby=standby)
