"""A role's slot: its process, the standby that may take over, and when to restart it."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from cairn.config.kinds import RunConfig
from cairn.launch.start import StartDamaged
from cairn.launch.supervise.slot import RoleProcess, Slot, Turn
from cairn.run import noted_calls
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.exits import (
    END_SERVER,
    EXIT_ALTERED,
    EXIT_CRASHED,
    EXIT_DAMAGED,
    EXIT_LOST,
    EXIT_STOPPED,
    EXIT_USAGE,
    STANDBY,
    WORKING,
    PolicyAltered,
    RoleFailed,
)
from cairn.run.output import STACKS
from cairn.run.processes import log_end, processor_times, thread_that_crashed
from cairn.run.signals import STOP_SIGNALS

FROM_OUTSIDE = (signal.SIGKILL, *STOP_SIGNALS)
"""Signals that may well come from somebody else, such as the kernel if it is out of memory."""
STACKS_SECONDS = 0.5
"""How long a process that hangs has to write its stacks."""
BUSY = int(0.2e9 * STACKS_SECONDS)
"""Nanoseconds of a processor in that time from which a thread counts as at work."""
STOP_SECONDS = 20
"""Seconds that a server has to exit."""
OWN_WORKERS = ("trainer_rank", "trainer_spare")
"""Prefixes, in roles.json, of worker names that die with the trainer's driver."""


class RoleSlot(Slot):
    """Keeps a role filled until the run ends; constructing it starts the first process.

    early: a process that was started earlier, to be the first one if it lives.
    """

    def __init__(
        self,
        name: str,
        run: RunDirectory,
        config: RunConfig,
        *,
        local_ray: bool,
        early: RoleProcess | None = None,
    ):
        super().__init__(name, run, config)
        self.local_ray = local_ray
        """Whether a Ray cluster that the role starts serves this machine only."""
        self.lost: str | None = None
        """How the process died, if the run was stopping and so it was not replaced."""
        self._step = 0
        """The run's newest step, when it was looked after last."""
        self._spare = early
        """The process that takes over next."""
        self._asked = False
        """Whether it lived when it was asked to stop."""
        self._begin()

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Notice that the process ended or hangs, and restart it unless the run is stopping.

        `step` is the run's newest step.

        Raises:
            RoleFailed: it reported an error that would recur, or it died too often.
            UsageError: it refused a setting or the data; a server only at its first start.
            StartDamaged: it is the trainer, and the checkpoint that it must resume from is damaged.
            PolicyAltered: it is the orchestrator, and no server can load what the trainer has published.
        """
        if self.ended or self.lost:
            return
        if stopping and self._restart_at is not None:
            self._lose("died")
            return
        self._step = step
        how, code = self._look(), self.exit_code
        if how is None:
            if not stopping:
                self._keep_spare()
        elif code is None:
            self._replace(how, stopping=stopping, blame=self._blame_for_hang())
        elif code >= 0 and self.name in WORKING and not self._process.ended_by_itself:
            reason = f"left with exit code {code} before its end"
            blame = self._blame(f"ended with exit code {code}", sure=True)
            self._replace(reason, stopping=stopping, blame=blame)
        elif self.name in WORKING and code in (0, EXIT_STOPPED, EXIT_LOST):
            self.ended = True
        elif code == EXIT_USAGE and (self.name in WORKING or not self._restarted):
            raise UsageError(self._process.error_message())
        elif code == EXIT_DAMAGED and (damaged := StartDamaged.parse(self._process.error_message())):
            raise damaged
        elif code == EXIT_ALTERED and not stopping:
            raise PolicyAltered(self._process.error_message())
        else:
            crashed = code < 0 or code == EXIT_CRASHED or self.name not in WORKING
            reason = f"failed ({self._process.error_message()})" if code == EXIT_CRASHED else how
            blame = self._blame_for_signal(-code) if code < 0 else []
            self._replace(reason, for_good=not crashed, stopping=stopping, blame=blame)

    def begin_to_stop(self) -> None:
        """Kill the process with its whole session; a server only gets its signal, for `stop` to wait."""
        if self._spare is not None:
            self._spare.kill()
        self._asked = self.exit_code is None
        if self._asked and self.name not in WORKING:
            self._process.signal(END_SERVER)
        else:
            self._process.kill()

    def stop(self) -> None:
        """End the process, after `begin_to_stop`: a server that has not ended by itself is killed."""
        if not self._asked:
            return
        if self.name in WORKING:
            noted_calls.stop(self._calls)  # none of them is to blame
        elif not self._process.wait(STOP_SECONDS):
            self._process.kill()
        state = "stopped" if self.exit_code == 0 else "failed"
        self.run.set_role(self.name, state, self._process.pid)

    def _lose(self, how: str) -> None:
        """Leave the slot empty, because the run is stopping."""
        self.ended = self.name in WORKING
        self.lost = f"{self.name} {how}"

    @property
    def _calls(self) -> Path:
        """Where the process notes which calls of user code are in progress, if it makes any."""
        return self.run.calls(self.name)

    def _blame(self, how: str, *, sure: bool, suspects: Sequence[int] = ()) -> list[noted_calls.RunningCall]:
        """The calls of user code that are to blame for the process's death; each is charged with a try."""
        return noted_calls.charge(self._calls, self._process.pid, how, sure=sure, suspects=suspects)

    def _blame_for_signal(self, number: int) -> list[noted_calls.RunningCall]:
        """The same, for a signal that has killed the process."""
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        crash = number not in FROM_OUTSIDE
        suspects = thread_that_crashed(self.log) if crash else []
        return self._blame(f"was killed by {name}", sure=crash, suspects=suspects)

    def _blame_for_hang(self) -> list[noted_calls.RunningCall]:
        """Have the process, which hangs, write its stacks; kill it, and find who is to blame."""
        pid = self._process.pid
        before = processor_times(pid)
        self._process.signal(STACKS)
        time.sleep(STACKS_SECONDS)
        after = processor_times(pid)
        busy = [thread for thread, (had, _) in after.items() if had - before.get(thread, (had, 0))[0] > BUSY]
        self._process.kill()
        return self._blame("hung", sure=True, suspects=busy)

    def _replace(
        self,
        reason: str,
        *,
        for_good: bool = False,
        stopping: bool,
        blame: Sequence[noted_calls.RunningCall] = (),
    ) -> None:
        """Have another process take over by the restart rule, unless the run is stopping.

        Args:
            blame: the calls of user code that are to blame, of which there may be none.

        Raises:
            RoleFailed: the rule gives up.
        """
        self._process.kill()  # else its old workers run beside the new ones for a while
        self.run.set_role(self.name, "failed", self.pid)
        if self.name == "trainer":
            self.run.end_roles("failed", *OWN_WORKERS)
        if stopping and not (for_good and self.name == "trainer"):
            self._lose(reason)
            return
        if blame:
            more = f" and {len(blame) - 1} more calls" if len(blame) > 1 else ""
            reason += f" while it ran {blame[0].text}{more}, for which that is a failed try"
        if for_good or not self._plan_restart(self._step, excused=bool(blame)):
            raise RoleFailed(f"{self.name} {reason}; the end of {self.log}:\n{log_end(self.log)}")
        how = "is replaced by its standby" if self._has_spare() else "is started again"
        self.run.history.restart(self.name, step=self._step, reason=reason, how=how)

    def _start(self) -> RoleProcess:
        """The spare takes over; a new process if there is none."""
        if self._spare is not None and self._has_spare():
            process = self._spare
            process.begin()
        else:
            process = self._new_process()
        self._spare = None
        self._had_spare = not (self.config.standby and self.name in STANDBY)
        self._filled_at_step = self._step
        silence, lengthy = self.config.heartbeat_timeout, self.config.hang_timeout
        if self.name in WORKING:
            self.watch_over(process.pid, silence=silence, standstill=lengthy)
        else:
            self.watch_server(process.pid, silence=silence, lengthy=lengthy)
        return process

    def _has_spare(self) -> bool:
        return self._spare is not None and self._spare.exit_code is None

    def _keep_spare(self) -> None:
        """Start a spare, one for each process, once the process is so far that this doesn't disturb it."""
        if self._restart_at is None and not self._had_spare and self._step > self._filled_at_step:
            self._had_spare = True
            self._spare = self._new_process("standby")

    def _new_process(self, turn: Turn = "at once") -> RoleProcess:
        return RoleProcess(self.name, self.run.path, self.log, local_ray=self.local_ray, turn=turn)
