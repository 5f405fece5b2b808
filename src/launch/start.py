"""What a run starts or resumes from: chosen once, before any role runs, and nothing is written."""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest, check_files, load_manifest
from cairn.checkpoint.step_folder import StepFolder, newest_good, step_of
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.kinds import RunConfig
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import EXIT_DAMAGED
from cairn.run.metrics import why_exhausted

ASIDE_NAME = re.compile(r"before_attempt_([0-9]{1,15})")
"""Names of the folders that hold what an attempt has set aside."""


@dataclass(frozen=True)
class Start:
    """What a run starts from: a step_N folder, or nothing.

    All files of the folder are there with their sizes, and those without tensors are verified; `choose_start`
    says when tensor files are verified too. named: whether the user named the step. away: whether its tensors
    are in the run's object store, where ranks read them (`checkpoint.away`).
    """

    store: CheckpointStore
    folder: Path | None = None
    manifest: Manifest | None = None
    named: bool = False
    away: bool = False

    @property
    def step(self) -> int:
        """Optimiser steps done so far."""
        return self.manifest.step if self.manifest else 0

    @property
    def is_fork(self) -> bool:
        """Whether the checkpoint belongs to another run, so that a new run starts from it."""
        return self.folder is not None and not self.away and self.folder.parent != self.store.root


class StartDamaged(CairnError):
    """The checkpoint that an attempt resumes from is damaged; only a new attempt can go back before it."""

    exit_code = EXIT_DAMAGED

    def __init__(self, folder: Path, problem: str):
        super().__init__(problem)
        self.folder = folder

    def to_launcher(self) -> str:
        """The folder as one line of JSON, followed by the problem."""
        return f"{json.dumps(str(self.folder))}\n{self}"

    @classmethod
    def parse(cls, message: str) -> "StartDamaged | None":
        """The damage that the trainer's driver has sent (`to_launcher`); None if the message is empty."""
        folder, newline, problem = message.partition("\n")
        return cls(Path(json.loads(folder)), problem) if newline else None


def choose_start(
    config: RunConfig,
    *,
    needs: Sequence[str],
    damaged: StartDamaged | None = None,
    away: Path | None = None,
) -> Start:
    """Decide what the run starts from; nothing is written.

    The names and sizes of the step's files are checked, and the content of files without tensors. Tensor
    files are left to the ranks, which verify them while loading, so that each is read only once. They are
    verified here if damage must be known before anything is touched: if there are later steps, which resuming
    sets aside; if the run is complete, so that no rank loads the step; and if the orchestrator uses answers
    before the trainer has loaded the weights that they are sampled from (`--no-self-check`).

    With `--ckpt.resume auto` the choice may be the run's last step (`is_complete`): a script that repeats a
    command until it exits with 0 then learns that the run is done.

    Args:
        needs: the parts that the checkpoint must have: trainer, for RL also orchestrator.
        damaged: the checkpoint that the ranks could not load; the newest good step is then chosen, whatever
            the user asked for.
        away: the folder of the run's newest step, if its tensors are in the run's object store only.

    Raises:
        UsageError: the run can't start like this.
    """
    ckpt = config.ckpt
    store = CheckpointStore(RunDirectory(config.output_dir, ckpt and ckpt.dir).checkpoints)
    for link in store.links():
        print(
            f"{link} is a symbolic link, so it is no step of this run; its target stays untouched", flush=True
        )
    if ckpt is None and config.stop_after is not None:
        raise UsageError(
            f"--stop-after {config.stop_after}: without --ckpt nothing would be saved; add --ckpt"
        )
    if ckpt is None or not ckpt.resumes:
        return _fresh(config, store)
    start = _Choice(config, ckpt, store, needs, damaged, away).make()
    if start.folder:
        _check_parts(start, needs)
        _check_fit(config, start)
    if config.stop_after is not None and start.step >= config.stop_after and not is_complete(config, start):
        raise UsageError(
            f"--stop-after {config.stop_after}: the run resumes from step {start.step}, which is no earlier; "
            "give a later step, or leave it out"
        )
    if (early := ended_early(config, start)) and ckpt.resume != "auto":
        raise UsageError(f"{early}; or resume from an earlier step")
    if is_complete(config, start) and ckpt.resume != "auto":
        raise UsageError(
            f"--max-steps {config.max_steps}: the run resumes from step {start.step}, so no step is left to "
            "do; give a larger --max-steps"
        )
    return start


def is_complete(config: RunConfig, start: Start) -> bool:
    """Whether the run has done its last step already."""
    return start.step >= config.max_steps or ended_early(config, start) is not None


def ended_early(config: RunConfig, start: Start) -> str | None:
    """Why the run ended with this step before its last one, and how it goes on; None if it did not."""
    if start.folder is None or not config.patiences or start.step >= config.max_steps:
        return None
    record = StepFolder(start.folder).trainer_state()
    why = why_exhausted((record and record.validation) or {}, config.patiences)
    if why is None:
        return None
    return (
        f"the run ended early with {start.folder}: {why}. To go on, raise that validation's patience, or "
        "leave it out"
    )


def verified_before_loading(
    config: RunConfig, needs: Sequence[str], step: int, *, is_newest: bool = True
) -> bool:
    """Whether damage of a step's tensors must be known before ranks load them; `choose_start` says why.

    Args:
        is_newest: whether the run has no later step.
    """
    answers_count = "orchestrator" in needs and not config.self_check
    return not is_newest or step >= config.max_steps or answers_count


def damaged_start(damaged: StartDamaged) -> UsageError:
    """The error for a named step that can't be loaded."""
    return UsageError(f"can't resume: {damaged}; --ckpt.resume latest takes the newest good step")


def _fresh(config: RunConfig, store: CheckpointStore) -> Start:
    """The start of a new run.

    Raises:
        UsageError: the run has checkpoints already, which a new run would leave behind.
    """
    if steps := store.steps():
        raise UsageError(
            f"--output-dir {config.output_dir}: this run has checkpoints up to step {steps[-1]}; go on with "
            f"--ckpt.resume-step {steps[-1]} (or --ckpt.resume auto), or give another --output-dir"
        )
    return Start(store)


def newest_attempt(run: RunDirectory, store: CheckpointStore) -> int:
    """The number of the run's newest attempt in this directory; 0 if there was none.

    Branches and folders of abandoned steps are named after it, so no number may be used twice, even if
    roles.json, which records it, was lost.
    """
    earlier = run.attempt()
    aside = os.listdir(store.abandoned) if store.abandoned.is_dir() else []
    numbers = [int(match[1]) for match in map(ASIDE_NAME.fullmatch, aside) if match]
    if earlier:
        numbers.append(earlier.number)
    else:
        numbers.append(run.history.newest_attempt())
        for step in store.steps():
            with contextlib.suppress(CheckpointError):
                numbers.append(store.manifest(step).attempt)
    return max(numbers, default=0)


class _Choice:
    """How `choose_start` decides for a run that the user asked to resume."""

    def __init__(
        self,
        config: RunConfig,
        ckpt: CkptConfig,
        store: CheckpointStore,
        needs: Sequence[str],
        damaged: StartDamaged | None,
        away: Path | None,
    ):
        self.config = config
        self.ckpt = ckpt
        self.store = store
        self.needs = needs
        self.damaged = damaged
        self.away = away
        self.steps = [*store.steps(), *([step_of(away)] if away else [])]

    def make(self) -> Start:
        """Choose; see `choose_start`."""
        if self.damaged or self.ckpt.resume in ("auto", "latest"):
            return self._newest_good()
        folder = self._named()
        try:
            return Start(self.store, folder, self._check(folder), named=True, away=folder == self.away)
        except CheckpointError as error:
            raise damaged_start(StartDamaged(folder, str(error))) from None

    def _newest_good(self) -> Start:
        def check(step: int) -> None:
            if self.damaged and self.damaged.folder == self._folder(step):
                raise Damaged(str(self.damaged))
            self._check(self._folder(step))

        step, damaged = newest_good(self.steps, check)
        for problem in damaged:
            print(f"passing over a damaged checkpoint: {problem}", flush=True)
        passed_over = bool(damaged or self.damaged)
        if step is not None:
            folder = self._folder(step)
            if passed_over:
                print(f"the newest good checkpoint is {folder}", flush=True)
            return Start(self.store, folder, load_manifest(folder), away=folder == self.away)
        wish = "latest" if self.ckpt.resume == "latest" else "auto"
        if wish == "latest" or passed_over:
            raise UsageError(f"--ckpt.resume {wish}: there is no good checkpoint in {self.store.root}")
        return Start(self.store)

    def _named(self) -> Path:
        """The folder of the step that the user named; it may belong to another run."""
        ckpt, store = self.ckpt, self.store
        if ckpt.resume_step is not None:
            if ckpt.resume_step not in self.steps:
                there = f"the steps {', '.join(map(str, self.steps))}" if self.steps else "none"
                raise UsageError(
                    f"--ckpt.resume-step {ckpt.resume_step}: no such checkpoint in {store.root}; "
                    f"there are {there}"
                )
            return self._folder(ckpt.resume_step)
        assert ckpt.resume is not None
        folder = Path(ckpt.resume).absolute()
        folder = folder.resolve() if folder.is_symlink() else folder
        if self.steps and folder.parent != store.root:
            raise UsageError(
                f"--ckpt.resume {ckpt.resume}: {store.root} already holds checkpoints of its own; "
                "give another --output-dir"
            )
        return folder

    def _folder(self, step: int) -> Path:
        return self.away if self.away and step == step_of(self.away) else self.store.folder(step)

    def _check(self, folder: Path) -> Manifest:
        """Check a step, except for what the ranks verify while loading; returns its manifest.

        Raises:
            CheckpointError: the run can't resume from it.
        """
        manifest = load_manifest(folder)
        if folder == self.away:  # what is here was compared when it came; sizes in the object store, too
            return manifest
        is_newest = not self.steps or folder == self._folder(self.steps[-1])
        tensors = verified_before_loading(self.config, self.needs, manifest.step, is_newest=is_newest)
        check_files(folder, manifest, content=self.ckpt.verify != "off", tensors=tensors)
        return manifest


def _check_parts(start: Start, needs: Sequence[str]) -> None:
    """Check that the checkpoint has the parts that this run needs.

    Raises:
        UsageError: a part is missing.
    """
    assert start.manifest is not None
    parts = start.manifest.parts
    if missing := [part for part in needs if part not in parts]:
        what = "holds weights only" if parts == ["model"] else f"has no {missing[0]} part"
        raise UsageError(
            f"{start.folder} {what}, so this run can't resume from it; "
            f"--model.name {start.folder} starts a new run from its weights"
        )


def _check_fit(config: RunConfig, start: Start) -> None:
    """Compare seed and packages with those of the checkpoint, before anything is touched.

    Another seed is an error; other package versions are a warning.

    Raises:
        UsageError: the seed differs.
    """
    assert start.folder is not None
    assert start.manifest is not None
    saved = StepFolder(start.folder).trainer_state()
    if saved and saved.seed not in (None, config.seed) and not start.is_fork:
        raise UsageError(
            f"--seed {config.seed}: {start.folder} was made with seed {saved.seed}, and a resumed run "
            f"keeps its seed; give --seed {saved.seed}"
        )
    for package, (version, now) in start.manifest.changed_versions().items():
        print(f"warning: {package} is {now} now and was {version} at step {start.step}", flush=True)
