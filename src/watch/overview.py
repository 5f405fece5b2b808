"""What is told of a run at a glance: how far it is, the few curves that matter, its roles, and what is wrong.

`overview` is a function of a run directory's files; whoever shows a run (the terminal, `runs`, `diagnose`)
shows what it says, so that all of them say the same.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError, age_of
from cairn.checkpoint.step_folder import StepFolders
from cairn.run.diagnosis import RULES, DiskRoom, Finding, Rule, RuleInput, findings
from cairn.run.errors import UsageError
from cairn.run.history import latest_attempt, resumed
from cairn.run.jsonlines import Row
from cairn.run.metrics import VALIDATED, number
from cairn.run.output import duration
from cairn.run.view import GOING_ON, RunSnapshot, RunView, State

MATTERS: Mapping[str, Sequence[tuple[str, str]]] = {
    "sft": [("loss", "loss")],
    "dpo": [("loss", "loss"), ("rewards/accuracies", "accuracy"), ("rewards/margins", "margin")],
    "reward": [("loss", "loss"), ("rewards/accuracies", "accuracy"), ("rewards/margins", "margin")],
    "rl": [
        ("reward/mean", "reward"),
        ("rollout/length", "length"),
        ("entropy", "entropy"),
        ("kl/reference", "kl"),
        ("staleness/mean", "staleness"),
    ],
}
"""The metrics that are shown of a run of each command, and what they are called; most important first."""
MATTERS |= {"trainer": MATTERS["rl"]}  # of a run on several machines
SHARE = 20
"""As many times as long as a look takes is the wait for the next one, at least."""
RECENT = 16
"""Rows from which speed and time left are taken."""
ROLES = ("trainer", "orchestrator", "inference", "exporter", "uploader")
"""Roles in the order in which they are shown; further servers and standbys come after them."""


FLAT = 1e-3
"""A curve whose values vary by less than this share of their size is drawn flat."""


def scaled(values: Iterable[float]) -> tuple[float, float]:
    """The ends of a scale for a curve of these values, at least one: noise in the last digits looks flat."""
    known = list(values)
    low, high = min(known), max(known)
    lacking = max((max(abs(low), abs(high)) * FLAT or 1.0) - (high - low), 0.0) / 2
    return low - lacking, high + lacking


@dataclass(frozen=True)
class Curve:
    """A metric over the steps of a run: its name in metrics.jsonl, a short label, and (step, value) pairs."""

    key: str
    label: str
    points: Sequence[tuple[int, float]]

    @property
    def newest(self) -> float:
        """The value of the newest step that has one."""
        return self.points[-1][1]


@dataclass(frozen=True)
class RoleLine:
    """One role: its state by roles.json, what it says that it does, and for how many seconds."""

    name: str
    state: str
    doing: str | None
    seconds: float | None

    @property
    def says(self) -> str:
        """What it does and for how long, or else its state."""
        lasting = f" ({duration(self.seconds)})" if self.seconds is not None and self.seconds >= 2 else ""
        return f"{self.doing or self.state}{lasting}"


@dataclass(frozen=True)
class NewestSave:
    """The newest checkpoint: its step, seconds since its commit (None if its time is unreadable), bytes."""

    step: int
    age: float | None
    nbytes: int


@dataclass(frozen=True)
class Overview:
    """A run at a glance. Times are in seconds."""

    path: Path
    command: str | None
    state: State
    step: int
    max_steps: int | None
    left: float | None
    """Time until the last step at the pace of the newest steps; None unless it is running."""
    pace: float | None
    """Time of a step, with its wait for the batch; the mean of the newest ones."""
    tokens_per_second: float | None
    mfu: float | None
    """Share of the GPUs' peak that training needs while it computes; the mean of the newest steps."""
    attention: str | None
    """What computes the attention of the newest step."""
    curves: Sequence[Curve]
    roles: Sequence[RoleLine]
    saved: NewestSave | None
    restarts: int
    recomputed: int
    goodput: float
    quiet: float | None
    """Time without a new step, of a run that is going on."""
    shares: Mapping[str, float]
    """Where the time of the newest steps went: `step` (computing) and `wait` of the trainer."""
    findings: Sequence[Finding]
    """What is wrong, in all of the run's steps or in the newest ones."""
    resume: str | None
    """The command that goes on with the run, where it is known and has something left to do."""
    age: float | None
    """Time since anybody was last seen at work on it."""
    seconds: float
    """Processor time that looking took."""

    @property
    def is_going_on(self) -> bool:
        """Whether a launcher is at work on the run."""
        return self.state in GOING_ON

    def pause(self, least: float) -> float:
        """Until the next look, `least` or longer: looking takes no more than a twentieth of a core."""
        return max(least, SHARE * self.seconds)


def overview(view: RunView, *, here: str | None = None, rules: Sequence[Rule] = RULES) -> Overview:
    """The run at a glance, from its files at this moment.

    Args:
        here: the run's directory as a command names it.
        rules: by which `findings` are found.

    Raises:
        DamagedFile: metrics.jsonl or history.jsonl as a whole can't be read.
    """
    began = time.process_time()
    shot = view.snapshot()
    rows = shot.metrics
    recent = [row for row in rows if row["step"] > _begins(shot)][1:][-RECENT:] or list(rows[-1:])
    spent = [(number(row, "time/step") or 0.0, number(row, "time/wait") or 0.0) for row in recent]
    computing, waiting = sum(one for one, _ in spent), sum(other for _, other in spent)
    pace = (computing + waiting) / len(recent) if computing else None
    alive = shot.is_going_on
    to_do = None if shot.max_steps is None else max(shot.max_steps - shot.step, 0)
    saved = newest_save(shot.checkpoints)
    last_active = view.run.last_active()
    tokens = sum(number(row, "learned_tokens") or 0.0 for row in recent)
    used = [share for row in recent if (share := number(row, "mfu")) is not None]
    disk = disk_room(shot.checkpoints, saved) if alive else None  # of a run that is over it does not matter
    seen = RuleInput(rows, shot.config or {}, here or str(shot.path), disk)
    return Overview(
        path=shot.path,
        command=shot.command,
        state=shot.state,
        step=shot.step,
        max_steps=shot.max_steps,
        left=to_do * pace if alive and to_do is not None and pace is not None else None,
        pace=pace,
        tokens_per_second=tokens / (computing + waiting) if tokens and computing else None,
        mfu=sum(used) / len(used) if used else None,
        attention=next((str(row["attention"]) for row in recent[-1:] if "attention" in row), None),
        curves=curves(shot.command, rows),
        roles=[*_roles(shot)],
        saved=saved,
        restarts=sum(shot.costs.restarts.values()),
        recomputed=shot.costs.recomputed_steps,
        goodput=shot.costs.goodput,
        quiet=_quiet(view, shot) if alive else None,
        shares={"step": computing / (computing + waiting), "wait": waiting / (computing + waiting)}
        if computing
        else {},
        findings=what_is_wrong(seen, rules),
        resume=None if alive or shot.state in ("done", "empty", "unknown") else resume_command(shot.history),
        age=None if last_active is None else max(shot.time - last_active, 0.0),
        seconds=time.process_time() - began,
    )


def _quiet(view: RunView, shot: RunSnapshot) -> float | None:
    """Seconds since the newest row of metrics.jsonl, or since the attempt began if that is later."""
    newest = latest_attempt(shot.history)
    began = [newest["time"]] if newest else []
    with contextlib.suppress(OSError):
        began.append(view.run.metrics.path.stat().st_mtime)
    return max(shot.time - max(began), 0.0) if began else None


def _begins(shot: RunSnapshot) -> int:
    return shot.attempt.start_step if shot.attempt else 0


def disk_room(checkpoints: Path, saved: NewestSave | None) -> DiskRoom | None:
    """How much room the disk of a run's checkpoints has; None if it can't be known."""
    try:
        return DiskRoom(shutil.disk_usage(checkpoints).free, saved.nbytes if saved else 0)
    except OSError:
        return None


def what_is_wrong(seen: RuleInput, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """What the rules find in all rows, and what they find in the newest rows alone."""
    found = findings(rules, seen)
    known = {finding.rule for finding in found}
    for rule in rules:
        found += [one for one in rule.look(seen.last(rule.window)) if one.rule not in known]
    return found


def values_of(command: str | None, row: Row) -> list[str]:
    """The values of one step that matter, as words: `reward 0.41`, `validation held 2.3`."""
    return [f"{curve.label} {curve.newest:.4g}" for curve in curves(command, [row])]


def curves(command: str | None, rows: Sequence[Row]) -> list[Curve]:
    """The curves that matter for a run of this command, and each of its validations and evaluations."""
    wanted = dict(MATTERS.get(command or "", MATTERS["sft"]))
    known = set[str]()
    for row in rows:
        new = row.keys() - known
        known |= new
        for key in sorted(new):
            if VALIDATED.fullmatch(key) or (key.startswith("eval/") and key.endswith("/reward")):
                wanted.setdefault(key, key.replace("/loss", "").replace("/reward", "").replace("/", " "))
    found: list[Curve] = []
    for key, label in wanted.items():
        points = [(row["step"], value) for row in rows if (value := number(row, key)) is not None]
        if points:
            found.append(Curve(key, label, points))
    return found


def _roles(shot: RunSnapshot) -> Sequence[RoleLine]:
    """The roles of the latest attempt; of the trainer's ranks only what rank 0 does."""
    lines: list[RoleLine] = []
    order = {name: place for place, name in enumerate(ROLES)}
    for name, role in sorted(shot.roles.items(), key=lambda item: (order.get(item[0], 99), item[0])):
        if role.state is None or name.startswith("trainer_rank"):
            continue
        worker = shot.roles.get("trainer_rank0") if name == "trainer" else None
        speaks = worker if worker is not None and worker.doing is not None else role
        running = role.state in ("running", "waiting")
        since = speaks.beat.since if speaks.beat is not None else None
        lines.append(
            RoleLine(
                name,
                role.state,
                speaks.doing if running else None,
                max(shot.time - since, 0.0) if running and since is not None and speaks.doing else None,
            )
        )
    return lines


def newest_save(checkpoints: Path) -> NewestSave | None:
    """The newest checkpoint in a folder; None if there is none that can be read."""
    folders = StepFolders(checkpoints)
    try:
        for step in reversed(folders.steps()):
            try:
                manifest = folders.manifest(step)
            except CheckpointError:  # damaged, or just deleted
                continue
            return NewestSave(step, age_of(manifest.created), manifest.nbytes)
    except (UsageError, OSError):
        return None
    return None


def resume_command(history: Sequence[Row], step: int | None = None) -> str | None:
    """The command that goes on with a run: that of its latest attempt, from the newest step or from `step`.

    None if the run's history does not have it, as that of a run that a Python program has started.
    """
    newest = latest_attempt(history) or {}
    argv = newest.get("argv")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return None
    return resumed([*map(str, argv)], str(newest.get("folder") or ""), step)
