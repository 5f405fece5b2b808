"""Decides how a run starts or resumes: once, here, before any role runs."""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest, check_files, load_manifest
from cairn.checkpoint.step import StepFolder
from cairn.checkpoint.store import CheckpointStore, verify
from cairn.config.ckpt import CkptConfig
from cairn.config.kinds import RunConfig
from cairn.launch.exits import EXIT_DAMAGED
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.files import make_folders, write_atomic, write_json

logger = logging.getLogger(__name__)

ASIDE_NAME = re.compile(r"before_attempt_([0-9]{1,15})")
"""Names of the folders that hold what an attempt has set aside."""


@dataclass(frozen=True)
class Start:
    """What a run starts from: a step_N folder, or nothing.

    All files of the folder are there with their sizes, and those without tensors are verified; `choose_start`
    says when tensor files are verified too. named: whether the user named the step.
    """

    store: CheckpointStore
    folder: Path | None = None
    manifest: Manifest | None = None
    named: bool = False

    @property
    def step(self) -> int:
        """Optimiser steps done so far."""
        return self.manifest.step if self.manifest else 0

    @property
    def is_fork(self) -> bool:
        """Whether the checkpoint belongs to another run, so that a new run starts from it."""
        return self.folder is not None and self.folder.parent != self.store.root


class StartDamaged(CairnError):
    """The checkpoint that an attempt resumes from is damaged; only a new attempt can go back before it."""

    exit_code = EXIT_DAMAGED

    def __init__(self, folder: Path, problem: str):
        super().__init__(problem)
        self.folder = folder

    def last_words(self) -> str:
        """The folder as one line of JSON, followed by the problem."""
        return f"{json.dumps(str(self.folder))}\n{self}"

    @classmethod
    def heard(cls, words: str) -> "StartDamaged | None":
        """The damage that the trainer's driver reported as its last words; None if there are none."""
        folder, newline, problem = words.partition("\n")
        return cls(Path(json.loads(folder)), problem) if newline else None


def choose_start(config: RunConfig, *, needs: Sequence[str], damaged: StartDamaged | None = None) -> Start:
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

    Raises:
        UsageError: the run can't start like this.
    """
    ckpt = config.ckpt
    store = CheckpointStore(RunDirectory(config.output_dir, ckpt and ckpt.dir).checkpoints)
    for link in store.links():
        print(
            f"{link} is a symbolic link, so it is no step of this run; its target stays untouched", flush=True
        )
    if ckpt is None or not ckpt.resumes:
        return _fresh(config, store)
    start = _Choice(config, ckpt, store, needs, damaged).make()
    if start.folder:
        _check_parts(start, needs)
        _check_fit(config, start)
    if is_complete(config, start) and ckpt.resume != "auto":
        raise UsageError(
            f"--max-steps {config.max_steps}: the run resumes from step {start.step}, so no step is left to "
            "do; give a larger --max-steps"
        )
    return start


def is_complete(config: RunConfig, start: Start) -> bool:
    """Whether the run has done its last step already."""
    return start.step >= config.max_steps


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


class _Choice:
    """How `choose_start` decides for a run that the user asked to resume."""

    def __init__(
        self,
        config: RunConfig,
        ckpt: CkptConfig,
        store: CheckpointStore,
        needs: Sequence[str],
        damaged: StartDamaged | None,
    ):
        self.config = config
        self.ckpt = ckpt
        self.store = store
        self.damaged = damaged
        self.steps = store.steps()
        self.counts_before_loading = "orchestrator" in needs and not config.self_check
        """Whether answers are used before the trainer has loaded the weights that they come from."""

    def make(self) -> Start:
        """Choose; see `choose_start`."""
        if self.damaged or self.ckpt.resume in ("auto", "latest"):
            return self._newest_good()
        folder = self._named()
        try:
            return Start(self.store, folder, self._check(folder), named=True)
        except CheckpointError as error:
            raise damaged_start(StartDamaged(folder, str(error))) from None

    def _newest_good(self) -> Start:
        passed_over = False
        for folder in map(self.store.folder, reversed(self.steps)):
            try:
                if self.damaged and self.damaged.folder == folder:
                    raise Damaged(str(self.damaged))
                start = Start(self.store, folder, self._check(folder))
            except CheckpointError as error:
                print(f"passing over a damaged checkpoint: {error}", flush=True)
                passed_over = True
                continue
            if passed_over:
                print(f"the newest good checkpoint is {folder}", flush=True)
            return start
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
            return store.folder(ckpt.resume_step)
        assert ckpt.resume is not None
        folder = Path(ckpt.resume).absolute()
        folder = folder.resolve() if folder.is_symlink() else folder
        if self.steps and folder.parent != store.root:
            raise UsageError(
                f"--ckpt.resume {ckpt.resume}: {store.root} already holds checkpoints of its own; "
                "give another --output-dir"
            )
        return folder

    def _check(self, folder: Path) -> Manifest:
        """Check a step, except for what the ranks verify while loading; returns its manifest.

        Raises:
            CheckpointError: the run can't resume from it.
        """
        manifest = load_manifest(folder)
        others_later = self.steps and folder != self.store.folder(self.steps[-1])
        nobody_loads = manifest.step >= self.config.max_steps
        check_files(
            folder,
            manifest,
            content=self.ckpt.verify != "off",
            tensors=bool(others_later or nobody_loads or self.counts_before_loading),
        )
        return manifest


def begin(
    run: RunDirectory, config: RunConfig, start: Start, recipe: Mapping[str, Any], *, command: str
) -> Attempt:
    """Prepare the run directory for an attempt from `start`, and announce the attempt to the roles.

    Later checkpoints go to `abandoned/`, later rows of metrics.jsonl are removed, and messages between roles
    are deleted. The directory stays locked while this process lives. `recipe` is the content of recipe.json.

    Raises:
        UsageError: another process is running in the directory.
    """
    if config.ckpt and config.ckpt.dir:
        _make_folder(run.checkpoints, f"--ckpt.dir {config.ckpt.dir}")
    _make_folder(run.path, f"--output-dir {config.output_dir}")
    if not run.lock():
        raise UsageError(f"--output-dir {config.output_dir}: another process is running in it")
    run.mend()
    run.end_roles("failed", "")  # of a killed attempt, so that they aren't taken for ours
    earlier = run.attempt()
    own_step = 0 if start.is_fork else start.step
    number = _newest_attempt(run, start.store) + 1
    rewinds = (start.store.latest() or 0) > own_step
    if own_step and start.manifest:
        run_id, branch = start.manifest.run_id, start.manifest.branch
    elif earlier and config.ckpt and config.ckpt.resume == "auto":  # killed before its first checkpoint
        run_id, branch = earlier.run_id, earlier.branch
    else:
        run_id, branch = secrets.token_hex(4), ""
    attempt = Attempt(
        run_id=run_id,
        number=number,
        command=command,
        branch=f"branch_{number}" if rewinds or not branch or recipe.get("prompts_again") else branch,
        start_step=start.step,
        resume_from=str(start.folder) if start.folder else None,
    )
    name = f"before_attempt_{number}"
    aside = start.store.set_aside_after(own_step, name)
    if aside:
        print(f"the checkpoints after step {own_step} are now in {aside}", flush=True)
    run.set_batches_aside(start.store.abandoned / name, attempt)
    # roles.json may have been damaged; then the checkpoint tells that it is the same run.
    goes_on = earlier.run_id == run_id if earlier else own_step > 0
    if not goes_on and earlier:
        run.history.path.unlink(missing_ok=True)
    elif not goes_on and run.history.path.exists():  # its run is unknown
        make_folders(start.store.abandoned / name)
        run.history.path.rename(start.store.abandoned / name / run.history.path.name)
    run.history.begin_attempt(number, run.last_sign() if goes_on else None)
    dropped = run.metrics.keep_through(own_step)
    wanted = rewinds and start.named  # the user asked to go back
    run.history.recompute(dropped if goes_on and not wanted else 0)
    for change in recipe["trainer"].get("changes", []):
        if change["step"] == start.step:
            run.history.change(change)
    run.versions.clear()
    write_json(run.recipe, recipe, durable=True)
    write_atomic(run.config, (config.model_dump_json(indent=2) + "\n").encode(), durable=True)
    run.begin(attempt)
    return attempt


def _newest_attempt(run: RunDirectory, store: CheckpointStore) -> int:
    """The number of the run's newest attempt; 0 if there was none.

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


def newest_start(attempt: Attempt, store: CheckpointStore, *, pass_over: bool) -> Attempt:
    """The attempt as seen by a role that starts in the middle of it: from its newest good checkpoint.

    As in `choose_start`, tensor files are verified by those who load them.

    Args:
        pass_over: skip a damaged checkpoint and take an older one. The trainer can't: the batches that led to
            the damaged step are deleted.

    Raises:
        StartDamaged: the newest checkpoint is damaged, and `pass_over` is false.
    """
    for step in reversed(store.steps()):
        if step <= attempt.start_step:
            break
        folder = store.folder(step)
        try:
            manifest = verify(folder, tensors=False)
        except CheckpointError as error:
            if not pass_over:
                raise StartDamaged(folder, str(error)) from None
            logger.warning("passing over a damaged checkpoint: %s", error)
            continue
        if (manifest.run_id, manifest.branch) == (attempt.run_id, attempt.branch):
            return dataclasses.replace(attempt, start_step=step, resume_from=str(folder))
    return attempt


def _make_folder(path: Path, setting: str) -> None:
    """Create a folder early that is written to only much later.

    Raises:
        UsageError: it can't be created or written to; the message names the setting.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"{setting}: {path} is not a writable folder ({error.strerror})") from None


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
    for package, version in start.manifest.versions.items():
        now = platform.python_version() if package == "python" else _version(package)
        if now != version:
            print(f"warning: {package} is {now} now and was {version} at step {start.step}", flush=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
