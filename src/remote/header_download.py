"""Brings of a remote step what comes before its tensors' values, which ranks read in the object store."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, Manifest, holds_tensors
from cairn.checkpoint.tensors.remote_ranges import READERS, beginning, note_away
from cairn.remote.step_store import OnBytes, RemoteStore
from cairn.run.files import make_folders, write_atomic


def bring_beginnings(
    remote: RemoteStore,
    manifest: Manifest,
    root: Path,
    *,
    whole: Callable[[str], bool] = lambda name: False,
    on_bytes: OnBytes = lambda count: None,
) -> Path:
    """Make the folder of a remote step in `root` as `checkpoint.away` describes it; returns it.

    Sizes of all files are compared with the manifest, and the content of those that are brought whole.

    Args:
        manifest: the step's; none of its files are packed.
        root: a folder of its own; whatever is in it is removed.
        whole: says which tensor files, by name, are brought whole.

    Raises:
        CheckpointError: the step has packed files, of which ranks can't read ranges.
        Damaged: an object is not what the manifest says.
        RemoteError: the object store refuses or fails.
    """
    if manifest.contents:
        raise CheckpointError(f"{remote}: step {manifest.step} is compressed, and must be downloaded whole")
    shutil.rmtree(root, ignore_errors=True)
    folder = root / f"step_{manifest.step}"
    make_folders(folder)
    away = {
        name: entry.size
        for name, entry in manifest.files.items()
        if holds_tensors(name) and entry.size and not whole(name)
    }
    remote.check_sizes(manifest)
    here = {name: entry for name, entry in manifest.files.items() if name not in away}
    remote.fill(folder, manifest.model_copy(update={"files": here}), on_bytes)

    def bring(name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        there = f"{folder.name}/{name}"
        first = beginning(lambda at, n: remote.objects.read(there, at, n), away[name], f"{remote}/{there}")
        write_atomic(folder / name, first)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(bring, away))
    note_away(folder, remote.objects.url, away)
    write_atomic(folder / FILE_NAME, manifest.to_json())
    return folder
