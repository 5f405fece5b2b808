"""Starting a run, or going on with one: decided once, here, before any role runs."""

import contextlib
import dataclasses
import importlib.metadata
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
from cairn.run.files import make_folders, read_note, write_atomic, write_json

logger = logging.getLogger(__name__)

ASIDE_NAME = re.compile(r"before_attempt_([0-9]{1,15})")
"""Of the folders of what attempts have set aside."""

DAMAGE_NOTE = "damaged.json"
"""In the run directory, from the trainer's driver to the launcher: which checkpoint its ranks can't load."""


@dataclass(frozen=True)
class Start:
    """What a run goes on from: a step_N folder, or nothing.

    Every file of the folder is there with its size, and those that hold no tensors are as they were written;
    `choose_start` says when that is also known of the others. named: whether the user named the step.
    """

    store: CheckpointStore
    folder: Path | None = None
    manifest: Manifest | None = None
    named: bool = False

    @property
    def step(self) -> int:
        """Optimiser steps done before."""
        return self.manifest.step if self.manifest else 0

    @property
    def is_fork(self) -> bool:
        """Whether it is another run's checkpoint, which a new run starts from."""
        return self.folder is not None and self.folder.parent != self.store.root


class StartDamaged(CairnError):
    """The checkpoint that an attempt goes on from is damaged: only another attempt can go back behind it."""

    exit_code = EXIT_DAMAGED

    def __init__(self, folder: Path, problem: str):
        super().__init__(problem)
        self.folder = folder

    def report(self, run: RunDirectory) -> None:
        """Let the launcher know."""
        write_json(run.path / DAMAGE_NOTE, {"folder": str(self.folder), "problem": str(self)})

    @classmethod
    def reported(cls, run: RunDirectory) -> "StartDamaged | None":
        """What the trainer's driver has reported, once."""
        path = run.path / DAMAGE_NOTE
        note = read_note(path, dict[str, str])
        path.unlink(missing_ok=True)
        return cls(Path(note["folder"]), note["problem"]) if note else None


def choose_start(config: RunConfig, *, needs: Sequence[str], damaged: StartDamaged | None = None) -> Start:
    """Decide what the run goes on from; nothing is written.

    Names and sizes of the step's files are checked, and the content of those that hold no tensors. Tensor
    files are left to the ranks, which check them while they load them, so that each is read once. They are
    checked here where damage must be known before anything is touched: if there are later steps, which going
    on sets aside; if the run is complete, so that nobody loads the step; and if an RL run's answers count
    before its trainer has loaded the weights that they are sampled from (`--no-self-check`).

    With `--ckpt.resume auto` that may be its last step (`is_complete`): whoever runs a command again until it
    ends with 0 gets to know that the run is done.

    Args:
        needs: the parts that a checkpoint to go on from must have: trainer, for RL also orchestrator.
        damaged: what the ranks could not load; the newest good step is taken, whatever the user asked for.

    Raises:
        UsageError: it can't start like this.
    """
    ckpt = config.ckpt
    store = CheckpointStore(RunDirectory(config.output_dir, ckpt and ckpt.dir).checkpoints)
    for link in store.links():
        print(f"{link} is a link, so it is no step of this run; what it leads to is left alone", flush=True)
    if ckpt is None or not ckpt.resumes:
        return _fresh(config, store)
    start = _Choice(config, ckpt, store, needs, damaged).make()
    if start.folder:
        _check_parts(start, needs)
        _check_fit(config, start)
    if is_complete(config, start) and ckpt.resume != "auto":
        raise UsageError(
            f"--max-steps {config.max_steps}: the run goes on from step {start.step}, so nothing is left "
            "to do; give a larger one"
        )
    return start


def is_complete(config: RunConfig, start: Start) -> bool:
    """Whether nothing is left to do."""
    return start.step >= config.max_steps


def damaged_start(damaged: StartDamaged) -> UsageError:
    """The error of a step that the user has named, and that can't be gone on from."""
    return UsageError(f"can't resume: {damaged}; --ckpt.resume latest takes the newest good step")


def _fresh(config: RunConfig, store: CheckpointStore) -> Start:
    """The start of a run that goes on from nothing.

    Raises:
        UsageError: there are steps that it would leave behind.
    """
    if steps := store.steps():
        raise UsageError(
            f"--output-dir {config.output_dir}: this run has checkpoints up to step {steps[-1]}; go on with "
            f"--ckpt.resume-step {steps[-1]} (or --ckpt.resume auto), or give another --output-dir"
        )
    return Start(store)


class _Choice:
    """How `choose_start` decides what a run goes on from that was asked to go on."""

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
        """Whether answers count before the trainer has loaded the weights that they come from."""

    def make(self) -> Start:
        """The choice; see `choose_start`."""
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
        """The folder of the step that the user names, which may be another run's."""
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
        """Check a step as far as that is not left to those who load it; returns its manifest.

        Raises:
            CheckpointError: it can't be gone on from.
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
    """Make the run directory ready for an attempt from `start`, and announce it to the roles.

    What lies beyond that step is set aside: later checkpoints under `abandoned/`, later rows of
    metrics.jsonl, and whatever was in transit between roles. The directory stays locked while this process
    lives. `recipe` is what recipe.json is to hold.

    Raises:
        UsageError: another run is at work in the directory.
    """
    if config.ckpt and config.ckpt.dir:
        _make_folder(run.checkpoints, f"--ckpt.dir {config.ckpt.dir}")
    _make_folder(run.path, f"--output-dir {config.output_dir}")
    if not run.lock():
        raise UsageError(f"--output-dir {config.output_dir}: another run is at work in it")
    run.mend()
    run.end_roles("failed", "")  # those of an attempt that was killed, before anybody takes them for ours
    earlier = run.attempt()
    own_step = 0 if start.is_fork else start.step
    number = _newest_attempt(run, start.store) + 1
    rewinds = (start.store.latest() or 0) > own_step
    if own_step and start.manifest:
        run_id, branch = start.manifest.run_id, start.manifest.branch
    elif earlier and config.ckpt and config.ckpt.resume == "auto":  # it died before its first checkpoint
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
    # Without roles.json, which may have been damaged, a checkpoint says that it is the same run.
    goes_on = earlier.run_id == run_id if earlier else own_step > 0
    if not goes_on and earlier:
        run.history.path.unlink(missing_ok=True)
    elif not goes_on and run.history.path.exists():  # there is no saying whose it is
        make_folders(start.store.abandoned / name)
        run.history.path.rename(start.store.abandoned / name / run.history.path.name)
    run.history.begin_attempt(number, run.last_sign() if goes_on else None)
    dropped = run.metrics.keep_through(own_step)
    wanted = rewinds and start.named  # the user goes back on purpose
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
    """The number of the newest attempt of the run; 0 if there was none.

    It names branches and folders of abandoned steps, so it must not be taken twice, even if roles.json, which
    says what it is, was lost.
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
    """The attempt as a role that is started in the middle of it sees it: from its newest good checkpoint.

    As in `choose_start`, tensor files are left to those who load them.

    Args:
        pass_over: go back behind one that is damaged. The trainer can't: the step is there, and the batches
            that led to it are not.

    Raises:
        StartDamaged: it is damaged and not to be passed over.
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
    """Make a folder now that is written to only much later.

    Raises:
        UsageError: it can't be made, or not written into; naming the setting.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"{setting}: {path} is no folder that can be written to ({error.strerror})"
        ) from None


def _check_parts(start: Start, needs: Sequence[str]) -> None:
    """See that the checkpoint holds what this run needs.

    Raises:
        UsageError: it does not.
    """
    assert start.manifest is not None
    parts = start.manifest.parts
    if missing := [part for part in needs if part not in parts]:
        what = "holds weights only" if parts == ["model"] else f"has no {missing[0]} part"
        raise UsageError(
            f"{start.folder} {what}, so this run can't go on from it; "
            f"--model.name {start.folder} starts a new run from its weights"
        )


def _check_fit(config: RunConfig, start: Start) -> None:
    """Compare seed and packages with those of the checkpoint, before anything is touched.

    Another seed is an error; other versions of packages are a warning.

    Raises:
        UsageError: naming what differs.
    """
    assert start.folder is not None
    assert start.manifest is not None
    saved = StepFolder(start.folder).trainer_state()
    if saved and saved.seed not in (None, config.seed) and not start.is_fork:
        raise UsageError(
            f"--seed {config.seed}: {start.folder} was made with seed {saved.seed}, and a resumed run "
            f"goes on with that; give --seed {saved.seed}"
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
