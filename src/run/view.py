"""The reader of run directories, for whatever shows or judges a run: commands, page, sinks and Python.

It copes with files in any state: being written to, cut short by a kill, or damaged. What can't be read is
left out. It knows the files of the run as a whole. Rollouts and the ledger are read by the orchestrator's
modules, which write them, and steps by `checkpoint`. tests/unit/test_imports.py holds everybody else to this.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cairn.run.directory import RunDirectory, checkpoints_by
from cairn.run.files import DamagedFile, read_json, read_note
from cairn.run.heartbeat import Beat
from cairn.run.history import Account, Costs, History, latest_attempt
from cairn.run.jsonlines import Row
from cairn.run.messages import Attempt, RoleEntry
from cairn.run.metrics import MetricsLog
from cairn.run.spans import SpanFiles, TimeSpan

State = Literal["empty", "unknown", "running", "stopping", "done", "stopped", "failed", "killed"]
GOING_ON: tuple[State, ...] = ("running", "stopping")
"""The states of a run that a launcher is at work on."""


@dataclass(frozen=True)
class RoleStatus:
    """What is known of a role, or of one of the trainer's ranks."""

    name: str
    entry: RoleEntry | None
    """What roles.json says of it."""
    beat: Beat | None
    """The newest heartbeat; an earlier process may have written it, so compare the pids."""

    @property
    def state(self) -> str | None:
        """running, waiting, done, stopped or failed; None if roles.json does not mention the role."""
        return self.entry.state if self.entry else None

    @property
    def doing(self) -> str | None:
        """What its process says that it is doing; None if another process wrote the newest heartbeat."""
        if self.beat is None or (self.entry is not None and self.entry.pid != self.beat.pid):
            return None
        return self.beat.doing


def command_of(attempt: Attempt | None, history: Sequence[Row]) -> str | None:
    """The command of the latest attempt, by roles.json or else by history.jsonl; None if neither has it."""
    if attempt is not None:
        return attempt.command
    newest = latest_attempt(history)
    match newest.get("argv") if newest else None:
        case [str(command), *_]:
            return command
        case _:
            return None


@dataclass(frozen=True)
class RunSnapshot:
    """What a run directory said at one moment, `time`, in seconds since 1970."""

    path: Path
    time: float
    checkpoints: Path
    """The folder of its checkpoints, by its configuration."""
    config: Mapping[str, Any] | None
    """The resolved configuration of the latest attempt; None if there is none, or a damaged one."""
    attempt: Attempt | None
    """The current or latest attempt; None if there is none, or roles.json is damaged."""
    locked: bool
    """Whether a launcher is at work on it."""
    roles: Mapping[str, RoleStatus]
    metrics: Sequence[Row]
    """The rows of metrics.jsonl, in the order of the file."""
    history: Sequence[Row]
    """The events of history.jsonl (run/history.py)."""
    costs: Costs
    """What restarts have cost until now."""
    batches: Sequence[int]
    """The steps for which a batch is on disk (RL)."""
    stop_requested: str | None
    """The reason for which somebody asked the run to stop, if so."""

    @property
    def step(self) -> int:
        """The newest finished optimiser step."""
        if self.metrics:
            return self.metrics[-1]["step"]
        return self.attempt.start_step if self.attempt else 0

    @property
    def max_steps(self) -> int | None:
        """The step at which the latest attempt ends."""
        steps = (self.config or {}).get("max_steps")
        return steps if type(steps) is int else None

    @property
    def is_going_on(self) -> bool:
        """Whether a launcher is at work on it."""
        return self.state in GOING_ON

    @property
    def state(self) -> State:
        """How the run is, as a whole.

        empty: no attempt is known. unknown: it has begun, and no file here says who is at work on it, as in a
        copy that lacks roles.json, unless history.jsonl says how its latest attempt ended. running, stopping:
        a launcher is at work; stopping once the run was asked to. done, stopped, failed: how the trainer of
        the latest attempt ended. killed: its launcher is gone and nobody said how it ended.
        """
        if self.locked:
            return "stopping" if self.stop_requested else "running"
        if self.attempt is None:
            return self._by_history()
        trainer = self.roles.get("trainer")
        match trainer.state if trainer else None:
            case "done":
                return "done"
            case "stopped":
                return "stopped"
            case "failed":
                return "failed"
            case _:
                return "killed"

    @property
    def command(self) -> str | None:
        """The command of the latest attempt; None if it is not known."""
        return command_of(self.attempt, self.history)

    def _by_history(self) -> State:
        ends = [event for event in self.history if event["event"] in ("attempt", "ended")]
        if not ends:
            return "unknown" if self.metrics else "empty"
        ended: dict[Any, State] = {
            "done": "done",
            "stopped": "stopped",
            "failed": "failed",
            "killed": "killed",
        }
        return ended.get(ends[-1].get("state"), "unknown")


class RunView:
    """Reads a run directory again and again, as it grows; writes nothing. For one thread.

    `snapshot` takes everything at once. The other methods take one thing each, for whoever looks often.
    """

    def __init__(self, path: str | Path, checkpoints: Path | None = None):
        """checkpoints: their folder, if it is not where the configuration says, as in a copy of the run."""
        self.run = RunDirectory(path)
        self._checkpoints = checkpoints
        self._metrics = MetricsLog(self.run.metrics.path)
        self._evals = MetricsLog(self.run.evals.path)
        self._history = History(self.run.history.path)
        self._spans = SpanFiles(self.run.spans)

    def metrics(self) -> Sequence[Row]:
        """The rows of metrics.jsonl; after a restart of the trainer the last ones may be gone again.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        return self._metrics.current()

    def evals(self) -> Sequence[Row]:
        """The rows of evals.jsonl, in the order of the file.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        return self._evals.current()

    def known_evals(self) -> Sequence[Row]:
        """The rows of evals.jsonl; none if the file as a whole can't be read."""
        try:
            return self.evals()
        except DamagedFile:
            return []

    def history(self) -> Sequence[Row]:
        """The events of history.jsonl.

        Raises:
            DamagedFile: the file as a whole can't be read.
        """
        return self._history.current()

    def spans(self) -> Sequence[TimeSpan]:
        """What each process did when (run/spans.py), by role and then as it ended.

        Raises:
            DamagedFile: a file as a whole can't be read.
        """
        return self._spans.current()

    def costs(self) -> Costs:
        """What restarts have cost, until now or until the run was last at work.

        Raises:
            DamagedFile: metrics.jsonl or history.jsonl as a whole can't be read.
        """
        rows = self.metrics()
        account = Account(self.run.history.path, rows[-1] if rows else None)
        return account.costs(None if self.run.is_locked() else self.run.last_active())

    def config(self) -> Mapping[str, Any] | None:
        """The resolved configuration of the latest attempt; None if there is none.

        Raises:
            DamagedFile: it is damaged.
        """
        return read_json(self.run.config, dict[str, Any])

    def recipe(self) -> Mapping[str, Any] | None:
        """recipe.json: the settings and inputs that results depend on, by part; None if there is none.

        Raises:
            DamagedFile: it is damaged.
        """
        return read_json(self.run.recipe, dict[str, Any])

    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints: where its configuration says, if that can be read."""
        return self._checkpoints or checkpoints_by(self.known_config(), self.run.path)

    def known_config(self) -> Mapping[str, Any] | None:
        """The resolved configuration of the latest attempt; None if there is none, or a damaged one."""
        return read_note(self.run.config, dict[str, Any])

    def attempt(self) -> Attempt | None:
        """The current or latest attempt; None if there is none, or roles.json is damaged."""
        return self.run.attempt()

    def stamp(self) -> str:
        """Changes when a file of the run does that is shown anywhere."""
        run = self.run
        paths = [run.metrics.path, run.history.path, run.roles, run.evals.path, run.rollouts, run.config]
        found = [f"{run.is_locked():d}", run.stop_requested() or ""]
        for path in (*paths, self.checkpoints()):
            try:
                status = os.stat(path)
                found.append(f"{status.st_mtime_ns:x}.{status.st_size:x}")
            except OSError:
                found.append("-")
        return ":".join(found)

    def beat(self, role: str) -> Beat | None:
        """The newest heartbeat of whoever has `role`."""
        return read_note(self.run.heartbeat(role), Beat)

    def command(self) -> str | None:
        """The command of the latest attempt; None if it is not known."""
        return command_of(self.attempt(), self.history())

    def snapshot(self) -> RunSnapshot:
        """Everything.

        Raises:
            DamagedFile: metrics.jsonl or history.jsonl as a whole can't be read.
        """
        entries, beats, history = self.run.current_roles() or {}, self.run.beats(), list(self.history())
        newest = latest_attempt(history)
        began = newest["time"] if newest else 0.0
        # A rank is not in roles.json; what it began before this attempt, a process of an earlier one did.
        beats = {name: beat for name, beat in beats.items() if name in entries or beat.since >= began}
        return RunSnapshot(
            path=self.run.path,
            time=time.time(),
            checkpoints=self.checkpoints(),
            config=self.known_config(),
            attempt=self.attempt(),
            locked=self.run.is_locked(),
            roles={
                name: RoleStatus(name, entries.get(name), beats.get(name))
                for name in sorted(entries.keys() | beats.keys())
            },
            metrics=list(self.metrics()),
            history=history,
            costs=self.costs(),
            batches=self.run.batch_steps(),
            stop_requested=self.run.stop_requested(),
        )
