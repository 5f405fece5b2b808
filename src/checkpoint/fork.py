"""Folders for copies of checkpoints, and copies as the first step of a new run (a fork)."""

import contextlib
import os
import secrets
from pathlib import Path

from cairn.checkpoint.manifest import Manifest, Origin, holds_tensors
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore, copy_file
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders


def fork(step: Path, output_dir: Path, *, link: bool = False) -> tuple[Path, Manifest]:
    """Copy a step into `output_dir` as the first of a new run; returns the copy's folder and manifest.

    Args:
        link: share the tensor files with the step, by hard links, where the file system can do that.

    Raises:
        UsageError: `output_dir` belongs to another run, lies in the step itself, or is not a folder.
        CheckpointError: the step is damaged.
        OSError: a file can't be written; the error names it.
    """
    manifest = verify(step)
    source = step.resolve()
    if source in (target := output_dir.resolve(), *target.parents):
        raise UsageError(f"{output_dir}: is inside the checkpoint itself; give a new folder")
    store = fresh_store(output_dir)
    parent = Origin(run_id=manifest.run_id, step=manifest.step)
    new = {"run_id": secrets.token_hex(4), "attempt": 0, "branch": "branch_1", "parent": parent}
    forked = manifest.model_copy(update=new)
    make_folders(store.root)
    with store.alone():
        check_empty(store, output_dir)
        return store.adopt(step, forked, share_tensors if link else copy_file), forked


def share_tensors(source: Path, target: Path) -> None:
    """Link a tensor file, where the file system can do that; copy every other file."""
    if holds_tensors(source.name):
        with contextlib.suppress(OSError):
            os.link(source, target, follow_symlinks=False)
            return
    copy_file(source, target)


def store_of_copies(dest: Path) -> CheckpointStore:
    """The store for copies of steps in the folder `dest`.

    Args:
        dest: an output folder, or a folder for checkpoints alone, which then is called `checkpoints`.

    Raises:
        UsageError: `dest` is not a folder.
    """
    store = CheckpointStore(dest if dest.name == "checkpoints" else dest / "checkpoints")
    if any(path.exists() and not path.is_dir() for path in (store.root, *store.root.parents)):
        raise UsageError(f"{dest}: is not a folder and can't be created; give another one")
    return store


def fresh_store(output_dir: Path) -> CheckpointStore:
    """The store of a run that has not begun.

    Raises:
        UsageError: `output_dir` belongs to another run, or is not a folder.
    """
    run = RunDirectory(output_dir)
    if any(path.exists() and not path.is_dir() for path in (run.checkpoints, run.path, *run.path.parents)):
        raise UsageError(f"{output_dir}: is not a folder and can't be created; give another one")
    if run.roles.exists():
        raise UsageError(f"{output_dir}: a run has begun here; give a new folder")
    return CheckpointStore(run.checkpoints)


def check_empty(store: CheckpointStore, output_dir: Path) -> None:
    """Check that a new run has no steps yet, while no other command can add one.

    Raises:
        UsageError: it has.
    """
    if store.steps():
        raise UsageError(f"{output_dir}: has checkpoints already; give a new folder")
