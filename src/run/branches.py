"""The branches of a run: which there are, which have ended, and why; all of it in one file, `branches.json`.

A decision is on record before anything follows from it, and the file is written whole or not at all. What a
rule decides depends on nothing but the branches' metrics. So whoever is killed, the next process comes to the
same decisions, or finds them made.
"""

import contextlib
import fcntl
import math
import os
import statistics
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError, one_of
from cairn.run.faults import fault_point
from cairn.run.file_system import flock, open_lock
from cairn.run.files import DamagedFile, make_folders, read_json, write_json
from cairn.run.metrics import number

FILE = "branches.json"
FOLDER = "branches"
"""In the folder of the whole: the run directories of the branches."""
NO_BRANCHES = "holds no branches of a run: it has no branches.json"


@dataclass(frozen=True)
class BranchEnd:
    """That a branch takes no further step; it had taken `step`. by: "rule" or "user"."""

    step: int
    by: str
    reason: str


@dataclass(frozen=True)
class BranchChoice:
    """Which branches go on after `step`, by the rule.

    scores: of each branch that was there, the mean of the metric; None: it is not a number.
    """

    step: int
    scores: dict[str, float | None]
    kept: list[str]


@dataclass(frozen=True)
class BranchStates:
    """The content of branches.json.

    names: of all branches, in the order of the command. metric, mode, window: by what the rule compares them,
    as in the settings. start: the checkpoint of another run from which all have started, if there is one;
    since: its step, else 0. choices: by rising steps. ended: by the branch's name.
    """

    names: list[str]
    metric: str
    mode: str
    window: int
    max_steps: int
    start: str | None = None
    since: int = 0
    choices: list[BranchChoice] = field(default_factory=list[BranchChoice])
    ended: dict[str, BranchEnd] = field(default_factory=dict[str, BranchEnd])

    @property
    def going_on(self) -> list[str]:
        """The branches that have not ended."""
        return [name for name in self.names if name not in self.ended]

    def ending(self, name: str, end: BranchEnd) -> "BranchStates":
        """With the end of a branch, unless it has ended before."""
        return replace(self, ended={name: end, **self.ended})

    def choosing(self, choice: BranchChoice) -> "BranchStates":
        """With a choice of the rule, and the ends of the branches that it does not keep."""
        states = replace(self, choices=[*self.choices, choice])
        ranked = ranking(choice.scores, self.mode)
        for place, name in enumerate(ranked):
            if name not in choice.kept:
                kept = ", ".join(f"{one} {shown_score(choice.scores[one])}" for one in choice.kept)
                reason = (
                    f"after step {choice.step} it was number {place + 1} of {len(ranked)} by {self.metric}: "
                    f"{shown_score(choice.scores[name])}; kept: {kept}"
                )
                states = states.ending(name, BranchEnd(choice.step, "rule", reason))
        return states


def shown_score(score: float | None) -> str:
    """A mean of the metric, for people."""
    return "no number" if score is None else f"{score:.6g}"


def ranking(scores: Mapping[str, float | None], mode: str) -> list[str]:
    """The branches, the best one first: equal ones in the order of `scores`, those without a number last."""
    sign = -1.0 if mode == "max" else 1.0

    def key(name: str) -> tuple[bool, float]:
        score = scores[name]
        return score is None, 0.0 if score is None else sign * score

    return sorted(scores, key=key)


class Branches:
    """The folder of all branches of a run."""

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        self.file = self.path / FILE
        self.logs = self.path / "logs"
        self._lock = self.path / ".branches.lock"

    def run(self, name: str) -> Path:
        """The run directory of a branch."""
        return self.path / FOLDER / name

    def settings(self, name: str) -> Path:
        """The file with the settings of a branch, or of a server that all share."""
        return self.path / "settings" / f"{name}.json"

    def exists(self) -> bool:
        """Whether there are branches here."""
        return self.file.is_file()

    def states(self) -> BranchStates:
        """What is on record.

        Raises:
            UsageError: there are no branches here.
            DamagedFile: it can't be read.
        """
        try:
            found = read_json(self.file, BranchStates)
        except DamagedFile as error:
            raise DamagedFile(
                f"{error}. Remove it, and go on with --ckpt.resume auto: the rule then chooses again, as "
                "before; branches that you have ended are to be ended again"
            ) from None
        if found is None:
            raise UsageError(f"{self.path}: {NO_BRANCHES}")
        return found

    def record(self, change: Callable[[BranchStates], BranchStates]) -> BranchStates:
        """Replace what is on record by what `change` makes of it; returns that.

        Raises:
            UsageError, DamagedFile: see `states`.
        """
        with self._locked():
            before = self.states()
            after = change(before)
            if after != before:
                self._write(after)
        return after

    def begin(self, states: BranchStates) -> None:
        """Record the branches of a new run."""
        make_folders(self.path / FOLDER)
        with self._locked():
            self._write(states)

    def _write(self, states: BranchStates) -> None:
        fault_point("branches.before_record")
        write_json(self.file, asdict(states), durable=True)
        fault_point("branches.recorded")

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        fd = open_lock(self._lock)
        try:
            flock(fd, fcntl.LOCK_EX, self._lock)  # a command may end a branch while another one runs them
            yield
        finally:
            os.close(fd)

    def end(self, name: str, reason: str) -> BranchStates:
        """Record that the user ends a branch, at whatever step it is; whoever runs it has it save and stop.

        Raises:
            UsageError: there is no such branch, it has ended, or it is the last one.
        """

        def ended(states: BranchStates) -> BranchStates:
            if name not in states.names:
                there = ", ".join(states.names)
                raise UsageError(
                    f"--end {name}: there is no such branch{one_of(name, states.names)}; there are {there}"
                )
            if name in states.ended:
                raise UsageError(f"--end {name}: it has ended: {states.ended[name].reason}")
            if states.going_on == [name]:
                raise UsageError(
                    f"--end {name}: it is the last branch that goes on; Ctrl-C stops the command"
                )
            return states.ending(name, BranchEnd(self.step(name), "user", reason))

        return self.record(ended)

    def step(self, name: str) -> int:
        """The newest step in a branch's metrics."""
        return max((row["step"] for row in RunDirectory(self.run(name)).metrics.rows()), default=0)

    def score(self, states: BranchStates, name: str, step: int) -> float | None:
        """The mean of the metric over the last `window` steps up to `step`; None if that is not a number.

        Steps that don't have it, as between two evaluations, are left out.

        Raises:
            CairnError: none of these steps has it.
        """
        rows = RunDirectory(self.run(name)).metrics.rows()
        rows = [row for row in rows if step - states.window < row["step"] <= step]
        values = [value for row in rows if (value := number(row, states.metric)) is not None]
        if not values:
            known = sorted({key for row in rows for key in row})
            first = max(step - states.window, 0) + 1
            raise CairnError(
                f"branches.metric = {states.metric!r}: branch {name} has no such number in steps {first} to "
                f"{step} (branches.window = {states.window}){one_of(states.metric, known)}; it has those in "
                f"{self.run(name) / 'metrics.jsonl'}"
            )
        mean = statistics.fmean(values)
        return mean if math.isfinite(mean) else None

    def choose(self, step: int, count: int) -> BranchStates:
        """Record which `count` of the branches that go on are kept after `step`, unless that is on record.

        Raises:
            CairnError: a branch lacks the metric.
        """

        def chosen(states: BranchStates) -> BranchStates:
            if any(choice.step == step for choice in states.choices):
                return states
            scores = {name: self.score(states, name, step) for name in states.going_on}
            return states.choosing(BranchChoice(step, scores, ranking(scores, states.mode)[:count]))

        return self.record(chosen)
