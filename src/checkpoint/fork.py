"""Copies of checkpoints: as they are, in another folder, and as the first step of a new run (a fork)."""

import contextlib
import errno
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest, Origin, holds_tensors, load_manifest
from cairn.checkpoint.step_index import verify
from cairn.checkpoint.store import CheckpointStore, copy_file
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, read_note
from cairn.run.progress import Stage, no_progress


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
        return store.adopt(step, forked, _share_tensors if link else copy_file), forked


def _share_tensors(source: Path, target: Path) -> None:
    """Link a tensor file, where the file system can do that; copy every other file."""
    if holds_tensors(source.name):
        with contextlib.suppress(OSError):
            os.link(source, target, follow_symlinks=False)
            return
    copy_file(source, target)


def copy_step(step: Path, dest: Path, *, link: bool = False, stage: Stage = no_progress) -> Path:
    """Copy a step, as it is, into the `checkpoints/` of the folder `dest`; returns the copy's folder.

    The copy is a step of the same run: it appears there when all of it is written and verified.

    Args:
        dest: an output folder, or a folder for checkpoints alone, which then is called `checkpoints`.
        link: make hard links: the files take no space, and damage to one is damage to both.

    Raises:
        UsageError: `dest` is not a folder, is another run's, or can't have hard links to the step.
        CheckpointError: the step is damaged, or `dest` has a step of this number.
        OSError: a file can't be written; the error names it.
    """
    manifest = verify(step, on_bytes=stage(f"verifying {step.name}", load_manifest(step).nbytes))
    store = store_of_copies(dest)
    if step.resolve() in (target := store.root.resolve(), *target.parents):
        raise UsageError(f"{dest}: is inside the checkpoint itself; give another folder")
    with receiving(store, manifest.run_id, str(step)):
        progress = stage("linking" if link else "copying", manifest.nbytes)
        try:
            return store.adopt(step, manifest, os.link if link else copy_file, progress)
        except OSError as error:
            if link and error.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise UsageError(
                    f"{dest}: hard links to {step} can't be made there ({error.strerror}); leave out --link"
                ) from None
            raise


def store_of_copies(dest: Path) -> CheckpointStore:
    """The store for copies of steps in the folder `dest`; see `copy_step`.

    Raises:
        UsageError: `dest` is not a folder.
    """
    store = CheckpointStore(dest if dest.name == "checkpoints" else dest / "checkpoints")
    if any(path.exists() and not path.is_dir() for path in (store.root, *store.root.parents)):
        raise UsageError(f"{dest}: is not a folder and can't be created; give another one")
    return store


@contextlib.contextmanager
def receiving(store: CheckpointStore, run_id: str, name: str) -> Generator[None]:
    """Within this context, a step of a run, which messages call `name`, may be copied into the store.

    Raises:
        UsageError: it has steps of another run.
    """
    make_folders(store.root)
    with store.alone():
        if others := _runs_in(store) - {run_id}:
            raise UsageError(
                f"{store.root}: holds the run {', '.join(sorted(others))}, and {name} is of run {run_id}, "
                "which would go on as that; give another folder, or make a new run of it with ckpt fork"
            )
        yield


def _runs_in(store: CheckpointStore) -> set[str]:
    """The ids of the runs that a store has steps of, or that have begun in the folder around it."""
    found = {manifest.run_id for manifest in map(_manifest, map(store.folder, store.steps())) if manifest}
    roles = read_note(store.root.parent / "roles.json", dict[str, Any]) or {}
    return found | ({str(roles["run_id"])} if "run_id" in roles else set())


def _manifest(folder: Path) -> Manifest | None:
    try:
        return load_manifest(folder)
    except CheckpointError:  # it is damaged, and whose it was is not known
        return None


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
