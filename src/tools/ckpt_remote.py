"""`ckpt` commands on steps in an object store: what they say of a URL, and how they read one."""

import contextlib
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import STEP_NAME, CheckpointError, Manifest
from cairn.checkpoint.remote import Objects, RemoteStore
from cairn.checkpoint.store import CheckpointStore
from cairn.run.addresses import is_url
from cairn.run.errors import UsageError
from cairn.run.progress import progress_bars


def place(text: str) -> Path | str:
    """An argument that is a path or the URL of an object store, which a path would change."""
    return text if is_url(text) else Path(text)


def split(url: str) -> tuple[RemoteStore, int | None]:
    """The remote store that a URL leads into, and the step if it ends with the name of one."""
    prefix, _, name = url.rstrip("/").rpartition("/")
    if match := STEP_NAME.fullmatch(name):
        return RemoteStore(Objects(prefix)), int(match[1])
    return RemoteStore(Objects(url)), None


def one_step(url: str) -> tuple[RemoteStore, int]:
    """The store and the step of a URL.

    Raises:
        UsageError: it does not end with the name of a step.
    """
    remote, step = split(url)
    if step is None:
        found = remote.steps()
        example = f"{remote}/step_{found[-1]}" if found else "s3://bucket/prefix/step_20"
        raise UsageError(f"{url}: give one step, such as {example}")
    return remote, step


def rows(url: str) -> list[dict[str, Any]]:
    """The rows of `ckpt list`."""
    remote, step = split(url)
    summaries = [row for row in remote.summaries() if step in (None, row["step"])]
    if step is not None and not summaries:
        raise CheckpointError(f"{remote}: there is no step {step}")
    return [
        {
            "folder": f"{remote}/step_{row['step']}",
            "state": "complete" if row["parts"] != ["model"] else "complete, weights only",
            "kept_by": [],
            **row,
        }
        for row in summaries
    ]


def manifest(url: str) -> Manifest:
    """The manifest of a remote step, for `ckpt show`."""
    remote, step = one_step(url)
    return remote.manifest(step)


def verify(url: str) -> list[dict[str, Any]]:
    """The results of `ckpt verify`: every byte is read."""
    remote, step = split(url)
    results: list[dict[str, Any]] = []
    with progress_bars() as stage:
        for number in remote.steps() if step is None else [step]:
            problem = None
            try:
                nbytes = remote.manifest(number).nbytes
                remote.verify(number, on_bytes=stage(f"step {number}", nbytes))
            except CheckpointError as error:
                problem = str(error)
            folder = f"{remote}/step_{number}"
            results.append({"folder": folder, "ok": problem is None, "problem": problem})
    return results


@contextlib.contextmanager
def local(text: "Path | str") -> Generator[Path]:
    """A local folder with a step, for commands that read all of it; a remote one is downloaded for the time.

    Raises:
        UsageError: a URL does not end with the name of a step.
        CheckpointError: there is no such step, or it is damaged.
    """
    if isinstance(text, Path):
        yield text
        return
    remote, step = one_step(text)
    with tempfile.TemporaryDirectory(prefix="cairn-") as folder:
        with progress_bars() as stage:
            nbytes = remote.manifest(step).nbytes
            done = stage(f"downloading step {step}", nbytes)
            path = remote.fetch(step, CheckpointStore(folder), on_bytes=done)
        yield path
