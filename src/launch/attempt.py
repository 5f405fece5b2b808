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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.store import CheckpointStore, load_manifest, verify
from cairn.config.ckpt import CkptConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig, TrainerConfig
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, read_json, write_atomic, write_json

logger = logging.getLogger(__name__)

ASIDE_NAME = re.compile(r"before_attempt_([0-9]{1,15})")
"""Of the folders of what attempts have set aside."""

RunConfig = SFTConfig | TrainerConfig | RLConfig


@dataclass(frozen=True)
class Start:
    """What a run goes on from: a step_N folder that was checked in full, or nothing."""

    store: CheckpointStore
    folder: Path | None
    manifest: Manifest | None

    @property
    def step(self) -> int:
        """Optimiser steps done before."""
        return self.manifest.step if self.manifest else 0

    @property
    def is_fork(self) -> bool:
        """Whether it is another run's checkpoint, which a new run starts from."""
        return self.folder is not None and self.folder.parent != self.store.root


def choose_start(config: RunConfig, *, needs: list[str]) -> Start:
    """Decide what the run goes on from; nothing is written.

    With `--ckpt.resume auto` that may be its last step (`is_complete`): whoever runs a command again until it
    ends with 0 gets to know that the run is done.

    Args:
        needs: the parts that a checkpoint to go on from must have: trainer, for RL also orchestrator.

    Raises:
        UsageError: it can't start like this.
    """
    store = CheckpointStore(RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir).checkpoints)
    folder = _choose(config.ckpt, store, config.output_dir)
    start = Start(store, folder, _with_parts(folder, needs) if folder else None)
    if folder:
        _check_fit(config, start)
    if is_complete(config, start) and config.ckpt.resume != "auto":
        raise UsageError(
            f"--max-steps {config.max_steps}: the run goes on from step {start.step}, so nothing is left "
            "to do; give a larger one"
        )
    return start


def is_complete(config: RunConfig, start: Start) -> bool:
    """Whether nothing is left to do."""
    return start.step >= config.max_steps


class NewestDamaged(Exception):
    """The newest checkpoint of an attempt is damaged: only another attempt can go back behind it."""


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
    if own_step:
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
    wanted = rewinds and config.ckpt.resume not in ("auto", "latest")  # the user goes back on purpose
    run.history.recompute(dropped if goes_on and not wanted else 0)
    for change in recipe["trainer"].get("changes", []):
        if change["step"] == start.step:
            run.history.change(change)
    run.clear_weights()
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
                numbers.append(load_manifest(store.folder(step)).attempt)
    return max(numbers, default=0)


def newest_start(attempt: Attempt, store: CheckpointStore, *, pass_over: bool) -> Attempt:
    """The attempt as a role that is started in the middle of it sees it: from its newest good checkpoint.

    Args:
        pass_over: go back behind one that is damaged. The trainer can't: the step is there, and the batches
            that led to it are not.

    Raises:
        NewestDamaged: it is damaged and not to be passed over.
    """
    for step in reversed(store.steps()):
        if step <= attempt.start_step:
            break
        try:
            manifest = verify(store.folder(step))
        except CheckpointError as error:
            if not pass_over:
                raise NewestDamaged(str(error)) from None
            logger.warning("passing over a damaged checkpoint: %s", error)
            continue
        if (manifest.run_id, manifest.branch) == (attempt.run_id, attempt.branch):
            return dataclasses.replace(attempt, start_step=step, resume_from=str(store.folder(step)))
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


def _choose(ckpt: CkptConfig | None, store: CheckpointStore, output_dir: str) -> Path | None:
    """The step folder to go on from, checked in full; None starts fresh."""
    steps = store.steps()
    for link in store.links():
        print(f"{link} is a link, so it is no step of this run; what it leads to is left alone", flush=True)
    if ckpt is None or not ckpt.resumes:
        if steps:
            raise UsageError(
                f"--output-dir {output_dir}: this run has checkpoints up to step {steps[-1]}; go on with "
                f"--ckpt.resume-step {steps[-1]} (or --ckpt.resume auto), or give another --output-dir"
            )
        return None
    if ckpt.resume in ("auto", "latest"):
        folder, passed_over = store.newest_good(content=ckpt.verify != "off")
        for problem in passed_over:
            print(f"passing over a damaged checkpoint: {problem}")
        if folder is None:
            if ckpt.resume == "latest" or passed_over:
                raise UsageError(f"--ckpt.resume {ckpt.resume}: there is no good checkpoint in {store.root}")
            return None
        return folder
    if ckpt.resume_step is not None:
        if ckpt.resume_step not in steps:
            there = f"there are the steps {', '.join(map(str, steps))}" if steps else "there are none"
            raise UsageError(
                f"--ckpt.resume-step {ckpt.resume_step}: no such checkpoint in {store.root}; {there}"
            )
        folder = store.folder(ckpt.resume_step)
    else:
        folder = Path(ckpt.resume).absolute()
        folder = folder.resolve() if folder.is_symlink() else folder
        if steps and folder.parent != store.root:
            raise UsageError(
                f"--ckpt.resume {ckpt.resume}: {store.root} already holds checkpoints of its own; "
                "give another --output-dir"
            )
    try:
        verify(folder, content=ckpt.verify != "off")
    except CheckpointError as error:
        raise UsageError(f"can't resume: {error}; --ckpt.resume latest takes the newest good step") from None
    return folder


def _with_parts(folder: Path, needs: list[str]) -> Manifest:
    manifest = load_manifest(folder)
    missing = [part for part in needs if part not in manifest.parts]
    if missing:
        what = "holds weights only" if manifest.parts == ["model"] else f"has no {missing[0]} part"
        raise UsageError(
            f"{folder} {what}, so this run can't go on from it; "
            f"--model.name {folder} starts a new run from its weights"
        )
    return manifest


def _check_fit(config: RunConfig, start: Start) -> None:
    """Compare seed and packages with those of the checkpoint, before anything is touched.

    Another seed is an error; other versions of packages are a warning.

    Raises:
        UsageError: naming what differs.
    """
    assert start.folder is not None
    assert start.manifest is not None
    seed = (read_json(start.folder / "trainer" / "state.json") or {}).get("seed")
    if seed is not None and seed != config.seed and not start.is_fork:
        raise UsageError(
            f"--seed {config.seed}: {start.folder} was made with seed {seed}, and a resumed run "
            f"goes on with that; give --seed {seed}"
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
