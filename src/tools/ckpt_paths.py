"""What the paths mean that `ckpt` commands are given."""

from pathlib import Path
from typing import Any

from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import UsageError
from cairn.run.files import read_json

STORE_HELP = (
    "an output folder, its checkpoints folder, or a step_N folder, or the URL of one in an object store"
)
"""What `--help` says of a path that holds steps."""


def store_in(path: Path) -> CheckpointStore:
    """The store of a run directory or a checkpoints folder."""
    from cairn.run.directory import checkpoints_by  # imports numpy, which --help has no time for

    for root in (path / "checkpoints", path):
        store = CheckpointStore(root)
        if store.steps() or store.debris():
            return store
    if (store := CheckpointStore(checkpoints_by(run_config(path), path))).steps():
        return store
    raise UsageError(f"{path}: there are no checkpoints here")


def run_config(path: Path) -> dict[str, Any]:
    """config.json of the run that `path` is or lies in, if there is one."""
    for folder in (path, path.absolute().parent):
        if content := read_json(folder / "config.json", dict):
            return content
    return {}


def attempt_id(path: Path) -> str:
    """The id of the newest attempt of the run that `path` is or lies in; empty if there is none."""
    from cairn.run.directory import RunDirectory  # imports numpy, which --help has no time for

    attempts = (RunDirectory(folder).attempt() for folder in (path, path.absolute().parent))
    return next((attempt.id for attempt in attempts if attempt), "")
