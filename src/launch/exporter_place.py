"""The place of the exporter, whose death, unlike that of a role, ends no run."""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Protocol

from cairn.checkpoint.exports import RunExports
from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.launch.exits import EXIT_STOPPED, RoleFailed
from cairn.launch.exporting import exports_of, what_is_missing
from cairn.launch.place import Place
from cairn.launch.restarts import RestartRule
from cairn.launch.role_process import RoleProcess
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory

NAME = "exporter"


class Exporting(Protocol):
    """What the launcher asks for when it comes to exports."""

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Keep the process at work, unless the run is stopping; `step` is the run's newest step."""
        ...

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Wait until all is exported that can be, once the run's last step is saved.

        Args:
            update: called repeatedly, to show what the exporter does.
            interrupted: whether nobody wants to wait any longer.
        """
        ...

    def conclude(self, code: int) -> int:
        """Say how it ended, and return the launcher's exit code; that of the run alone would be `code`.

        Raises:
            RoleFailed: the run is complete, but something could not be exported.
        """
        ...


class NoExporter:
    """Of a run that exports nothing."""

    def look_after(self, step: int, *, stopping: bool) -> None:
        """There is no process."""

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """There is nothing to wait for."""

    def conclude(self, code: int) -> int:
        """There is nothing to say."""
        return code


@contextlib.contextmanager
def exporting(run: RunDirectory, config: RunConfig, attempt: Attempt) -> Generator[Exporting]:
    """What exports the run's steps as long as the block lasts."""
    made = exports_of(config, attempt.id)
    if made is None:
        yield NoExporter()
        return
    place = ExporterPlace(run, config, made)
    try:
        yield place
    finally:
        place.stop()


class ExporterPlace(Place):
    """Keeps a process at work that exports steps (`exporting.run_exporter`), until the run's end.

    A process that dies or hangs is replaced. After too many deaths without an export in between nothing more
    is exported, which is said at once and at the end of the run.
    """

    def __init__(self, run: RunDirectory, config: RunConfig, made: RunExports):
        super().__init__(NAME, run.logs / f"{NAME}.log", run)
        self.config = config
        self.made = made
        self.store = CheckpointStore(run.checkpoints)
        self._rule = RestartRule(config.max_restarts)
        self._restart_at: float | None = None
        self.ended = False
        """Whether the exporter's work is done or given up."""
        self.interrupted = False
        """Whether somebody did not want to wait for its end."""
        self._fill()

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Notice that the process ended or hangs, and start another one; see `Exporting`."""
        if self.ended or stopping:
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
            self.run.set_role(NAME, "done", self._occupant.pid)
            self.ended = True
            return
        else:
            how = f"died (exit code {code})"
        self._occupant.kill()
        self.run.set_role(NAME, "failed", self._occupant.pid)
        done = set(self.made.due(self.store.steps())) - set(self.made.missing(self.store))
        wait = self._rule.wait_after_death(max(done, default=0))
        if wait is None:
            self.ended = True
            reason = f"the exporter {how} too often; see {self.log}"
            self.made.exports.give_up(self.made.attempt, reason)
            waiting = self.made.missing(self.store)
            self.run.history.not_exported(min(waiting, default=self.made.last), reason)
            return
        self.note_restart(how, "is started again", step=step)
        self._restart_at = time.monotonic() + wait

    def finish(self, update: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Wait until all is exported or given up; then delete what stayed for that. See `Exporting`."""
        while not self.ended:
            if interrupted():
                self.interrupted = True
                return
            self.look_after(self.config.max_steps, stopping=False)
            update()
            time.sleep(0.05)
        assert self.config.ckpt is not None, "there are exports"
        apply_retention(self.store, self.config.ckpt, lambda unkept: self.made.hold(self.store, unkept).kept)

    def conclude(self, code: int) -> int:
        """Say what is exported, what is not, and what never will be; see `Exporting`."""
        exports = self.made.exports
        if gone := self._gone():
            print(
                f"warning: never exported, since retention deleted it first: {_steps(gone)}; a larger "
                "--ckpt.export.max-waiting keeps more of what waits",
                flush=True,
            )
        if code == EXIT_STOPPED:
            if waiting := self.made.waiting(self.store):
                print(f"not exported yet: {_steps(waiting)}; a resumed run goes on with that", flush=True)
            return code
        missing = what_is_missing(self.made, self.store)
        if missing and self.interrupted:
            print(
                f"stopped before all was exported to {exports.folder}: {missing}; --ckpt.resume auto goes on",
                flush=True,
            )
            return EXIT_STOPPED
        if missing:
            raise RoleFailed(
                f"the run is complete, but {exports.folder} is not: {missing}; --ckpt.resume auto tries again"
            )
        print(f"exported to {exports.folder}", flush=True)
        return code

    def stop(self) -> None:
        """Kill the process; what it was exporting is begun again by the next attempt."""
        if self._occupant.exit_code is None:
            self._occupant.kill()
            self.run.set_role(NAME, "stopped", self._occupant.pid)

    def _gone(self) -> list[int]:
        """The steps that failed in this attempt, by history.jsonl, and can't be exported any more."""
        failed: set[int] = set()
        for event in self.run.history.rows():
            if event["event"] == "attempt":
                failed = set()
            elif event["event"] == "not_exported":
                failed.add(event["step"])
        there = {step for step in failed if self.made.exports.folder_of(step).exists()}
        newest = self.store.latest() or 0
        return sorted(step for step in failed - there - set(self.store.steps()) if step < newest)

    def _fill(self) -> None:
        self._restart_at = None
        self._occupant = RoleProcess(NAME, self.run.path, self.log, local_ray=True)
        allowed = self.config.hang_timeout  # it runs when nobody else does, so it may fall silent
        self.watch_over(self._occupant.pid, silence=allowed, standstill=allowed)


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
