"""Brings of a remote step what comes before its tensors' values, which ranks read in the object store."""

import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, Damaged, Manifest, holds_tensors
from cairn.checkpoint.tensors.remote_ranges import READERS, note_away
from cairn.remote.step_store import OnBytes, RemoteStore
from cairn.run.files import make_folders, write_atomic

FIRST_BYTES = 64 << 10
"""Bytes of a tensor file that are read first; its header is seldom longer."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


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
        write_atomic(folder / name, _beginning(remote, f"{folder.name}/{name}", away[name]))

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(bring, away))
    note_away(folder, remote.objects.url, away)
    write_atomic(folder / FILE_NAME, manifest.to_json())
    return folder


def _beginning(remote: RemoteStore, name: str, size: int) -> bytes:
    """All that comes before the values of a safetensors file."""
    first = bytes(remote.objects.read(name, 0, min(FIRST_BYTES, size)))
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else size
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise Damaged(f"{remote}/{name}: the header would be {length} bytes long")
    missing = 8 + length - len(first)
    more = bytes(remote.objects.read(name, len(first), missing)) if missing > 0 else b""
    return (first + more)[: 8 + length]
