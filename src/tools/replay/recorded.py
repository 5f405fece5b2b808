"""What a run directory has recorded of its steps: settings, rows of metrics, checkpoints and batches."""

import contextlib
import copy
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import KINDS, RunKind
from cairn.config.rl import SERVER
from cairn.config.shared import Place
from cairn.remote.remote_runs import remote_view
from cairn.run.batches import batch_files, batch_path
from cairn.run.directory import NO_RUN
from cairn.run.errors import UsageError
from cairn.run.jsonlines import Row
from cairn.run.metrics import ranges_of
from cairn.run.output import Stage, no_progress
from cairn.run.recipe import ENTRY
from cairn.run.view import RunView
from cairn.tools.ckpt_places import split, temporary_folder
from cairn.tools.replay.run_steps import DownloadedSteps, LocalSteps, RunSteps

OTHERWISE = {
    "preemption": None, "sinks": {}, "wandb": None, "slurm": None, "machine": None, "dry_run": False,
    "standby": False, "spare_workers": 0, "validation": [], "log_format": "text",
    "weight_transport": "files", "weight_encoding": "full", "keep_tokens_gb": 0, "keep_batches_gb": 0,
    "colocated": False,
}  # fmt: skip
"""Settings of the trainer that a replay has in place of the run's: none of them changes what is computed."""


@dataclass(frozen=True)
class StepRange:
    """Steps to be taken again: those after `start`, a checkpoint (0: the model), through `last`."""

    start: int
    last: int

    @property
    def steps(self) -> range:
        """Their numbers."""
        return range(self.start + 1, self.last + 1)

    def __str__(self) -> str:
        return f"step {self.last}" if len(self.steps) == 1 else f"steps {self.start + 1} to {self.last}"


class RecordedRun:
    """A run as far as its steps can be taken again."""

    def __init__(self, given: Place, view: RunView, steps: RunSteps, beside: Path):
        """Read what is there; the run may be going on.

        Args:
            given: what the user calls the run.
            steps: its checkpoints.
            beside: the folder in which folders for the time are made.

        Raises:
            UsageError: it is no run, or lacks what says how its steps were taken.
        """
        if not view.run.exists():
            raise UsageError(f"{given}: {NO_RUN}")
        config, command = view.known_config(), view.command()
        if config is None or command not in KINDS:
            what = "config.json" if config is None else f"note of which of {', '.join(KINDS)} has started it"
            raise UsageError(f"{given}: has no {what}, so its settings are not known")
        self.given = given
        self.beside = beside
        self._view = view
        self.run = view.run
        self.kind: RunKind = KINDS[command]
        self.config = config
        self.checkpoints = steps
        self.rows: dict[int, Row] = {row["step"]: row for row in view.metrics()}
        self.history = list(view.history())

    @classmethod
    def local(cls, path: Path) -> Self:
        """The run in a folder.

        Raises:
            UsageError: as the constructor.
        """
        view = RunView(path)
        return cls(path, view, LocalSteps(CheckpointStore(view.checkpoints())), path.absolute().parent)

    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the newest attempt, by role; empty if it is not known."""
        return self._view.recipe() or {}

    @property
    def trains_on_batches(self) -> bool:
        """Whether an orchestrator ships what it trains on, so that batches can't be made again."""
        return "orchestrator" in self.kind.parts

    @property
    def starts_servers(self) -> bool:
        """Whether the newest attempt has started its servers, rather than that it was given some."""
        return any(role.partition("_")[0] == SERVER for role in self.run.current_roles() or {})

    @cached_property
    def saved(self) -> list[int]:
        """The checkpoints that a run can go on from, oldest first, as they were at the first look."""
        found: list[int] = []
        for step in self.checkpoints.steps():
            try:
                if "trainer" in self.checkpoints.manifest(step).parts:
                    found.append(step)
            except CheckpointError:  # damaged: none to go on from
                continue
        return found

    def stretch(self, after: int | None, through: int | None) -> StepRange:
        """The steps to take again.

        Args:
            after: begins with the newest checkpoint that is not later than this step; None: so that the steps
                end with the newest checkpoint.
            through: the last of them; None: the one after `after`, or the newest checkpoint.

        Raises:
            UsageError: the run has no such steps.
        """
        saved = self.saved
        if after is None:
            if not saved:
                raise UsageError(f"{self.given}: has no checkpoint with the trainer's state; give --step")
            last = saved[-1] if through is None else through
            start = max((step for step in saved if step < last), default=0)
        else:
            start = max((step for step in saved if step <= after), default=0)
            last = after + 1 if through is None else through
        if last <= (start if after is None else after):
            raise UsageError(f"--through {last}: must be later than step {start if after is None else after}")
        stretch = StepRange(start, last)
        if missing := [step for step in stretch.steps if step not in self.rows]:
            newest = max(self.rows, default=0)
            raise UsageError(
                f"metrics.jsonl of {self.given} has no step {ranges_of(missing)}, so there is nothing to "
                f"compare with; the newest step is {newest}"
            )
        if rewound := [step for step in stretch.steps if "rewound_to" in self.rows[step]]:
            raise UsageError(
                f"at step {rewound[0]} the run went back because of a spike, which depends on how it came "
                "there; replay other steps"
            )
        for change in self._changes:
            if stretch.start < change["step"] < stretch.last:
                raise UsageError(
                    f"{change['name']} was changed after step {change['step']}, whose checkpoint is gone: "
                    "replay steps on one side of that"
                )
        return stretch

    @cached_property
    def _changes(self) -> list[Mapping[str, Any]]:
        recipe = self._record(self.saved[-1]).recipe if self.saved else None
        return [*(recipe or {}).get("changes", [])]

    def world_size(self, stretch: StepRange) -> int:
        """The number of ranks that took the steps: by the checkpoint at their end, or at their start."""
        for step in (stretch.last, stretch.start):
            if step in self.saved:
                return self.checkpoints.manifest(step).world_size
        return int(self.trainer().get("workers") or 1)

    def settings(self, stretch: StepRange) -> dict[str, Any]:
        """The trainer's settings for these steps, as they were then.

        Those that determine what is computed are in the recipe of the next checkpoint, the others are the
        latest attempt's.
        """
        settings = copy.deepcopy(self.trainer())
        settings |= {name: value for name, value in OTHERWISE.items() if name in settings}
        later = [step for step in self.saved if step >= stretch.last]
        # Of steps after the newest checkpoint, recipe.json and so config.json have the settings.
        recipe = self._record(later[0]).recipe if later else None
        values: Mapping[str, Any] = (recipe or {}).get("settings") or {}
        for name, value in values.items():
            if not ENTRY.match(name):
                _put(settings, name.split("."), value)
        for schedule in (settings, settings.get("critic") or {}):
            end = schedule.get("scheduler")
            if end and end.get("type") != "constant" and end.get("steps") is None:
                end["steps"] = self.config.get("max_steps")
        if data := settings.get("data"):
            data["epochs"] = None
        return settings | {"max_steps": stretch.last, "ckpt": {}}

    def trainer(self) -> dict[str, Any]:
        """The trainer's settings, as of the newest attempt."""
        config = self.config["trainer"] if self.kind.sections else self.config
        return dict(cast("Mapping[str, Any]", config))

    def _record(self, step: int) -> TrainerRecord:
        return self.checkpoints.trainer_state(step) or TrainerRecord()

    def batches(self, stretch: StepRange) -> list[Path]:
        """The files of the steps' batches.

        Raises:
            UsageError: some are not there any more.
        """
        there = {step for folder in (self.run.batches, self.run.trained) for step, _ in batch_files(folder)}
        if missing := [step for step in stretch.steps if step not in there]:
            raise UsageError(
                f"{self.given}: the batches of step {ranges_of(missing)} are not kept; runs keep theirs with "
                "--trainer.keep-batches-gb"
            )
        found = [
            (batch_path(self.run.trained, step), batch_path(self.run.batches, step)) for step in stretch.steps
        ]
        return [kept if kept.exists() else in_transit for kept, in_transit in found]


@contextlib.contextmanager
def recorded_run(given: Place, stage: Stage = no_progress) -> Generator[RecordedRun]:
    """The run in a folder, or at a URL, of which what is needed is downloaded as long as the context lasts.

    Raises:
        UsageError: it is no run, or lacks what says how its steps were taken.
        RemoteError: the object store refuses or fails.
    """
    if isinstance(given, Path):
        yield RecordedRun.local(given)
        return
    remote, step = split(given)
    if step is not None:
        raise UsageError(f"{given}: is a single step; give the URL of the run, {remote}")
    with remote_view(given) as view, temporary_folder(None) as room:
        downloads = CheckpointStore(room / "checkpoints")
        yield RecordedRun(given, view, DownloadedSteps(remote, downloads, stage), room)


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """Set what a dotted name says, if there is a section for it."""
    *sections, name = path
    inner: Any = settings
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    if isinstance(inner, dict) and name in inner:
        inner[name] = value
