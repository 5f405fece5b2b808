"""The interface to a place that keeps steps: a folder, or a prefix in an object store.

Retention and the `ckpt` commands work with any of them. `checkpoint.store.CheckpointStore` and
`remote.step_store.RemoteStore` fulfil it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cairn.checkpoint.eval_metrics import Ratings
from cairn.checkpoint.manifest import CheckpointError, Manifest, check_files, load_manifest
from cairn.run.output import Stage


@dataclass(frozen=True)
class SavedStep:
    """An existing step, and its metrics; `ratings` says which of these can be compared."""

    step: int
    metrics: Mapping[str, Any]
    ratings: Ratings = field(default_factory=Ratings)


@dataclass(frozen=True)
class Removable:
    """Something in a tier that can be deleted: a step, an unfinished save, or a branch that was set aside.

    name: its path or URL. delete: deletes it; raises OSError, or RemoteError in an object store.
    """

    name: str
    delete: Callable[[], object]


class Receiver(Protocol):
    """A local store of steps, as `Tier.fetch` writes into it."""

    def receive(self, manifest: Manifest, fill: Callable[[Path], None]) -> Path:
        """Commit a step whose files `fill` writes into the folder that it is given; returns that folder.

        Raises:
            CheckpointError: the step exists already.
        """
        ...


class Tier(Protocol):
    """A place that keeps the steps of a run.

    Every method of an object store also raises RemoteError if the store refuses or fails.
    """

    def steps(self) -> list[int]:
        """The steps that exist there, oldest first: those that have a manifest."""
        ...

    def name_of(self, step: int) -> str:
        """The path or URL of a step, whether or not it exists."""
        ...

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        ...

    def check(self, step: int) -> None:
        """Check that a step is whole, as thoroughly as this tier can before it deletes others.

        A folder reads every byte; an object store compares names and sizes.

        Raises:
            CheckpointError: it is damaged, or does not exist.
        """
        ...

    def verify(self, step: int, *, on_bytes: Callable[[int], None] = lambda count: None) -> Manifest:
        """Read every byte of a step, and compare it with the manifest.

        Args:
            on_bytes: called with the number of bytes that were read since the last call.

        Raises:
            CheckpointError: the step is damaged, or does not exist.
        """
        ...

    def ratings(self) -> Ratings:
        """The results of evaluations of the steps.

        Raises:
            CheckpointError: they can't be read.
        """
        ...

    def measured(self, metric: str | None) -> list[SavedStep]:
        """All steps, oldest first, with this metric where they have it; None: no metric is needed."""
        ...

    def rows(
        self, metric: str | None = None, kept_by: Mapping[int, list[str]] | None = None
    ) -> list[dict[str, Any]]:
        """What `ckpt list` shows: a row for each step, oldest first, and for what else a folder holds.

        Args:
            metric: one to be shown besides the usual.
            kept_by: why retention keeps each step, if that is known.
        """
        ...

    def pins(self) -> set[int]:
        """The steps that a person has pinned.

        Raises:
            CheckpointError: the file of pins can't be read, so any step may be pinned.
        """
        ...

    def useless_debris(self) -> list[Removable]:
        """What is left of saves, uploads and deletions that nobody will complete."""
        ...

    def abandoned_branches(self) -> list[Removable]:
        """The steps that were set aside when the run went back, by branch."""
        ...

    def set_aside_after(self, step: int, name: str) -> object:
        """Move the steps after `step` to `abandoned/<name>`, where no reader looks."""
        ...

    def delete(self, step: int) -> None:
        """Delete a step, its manifest first.

        Raises:
            OSError: it can't be deleted.
        """
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Hold the lock that keeps other `ckpt` commands out, if this tier has one."""
        ...

    def fetch(
        self, step: int, store: Receiver, *, on_bytes: Callable[[int], None] = lambda count: None
    ) -> Path:
        """Copy a step into a local store; returns its folder there.

        Raises:
            CheckpointError: the step does not exist here, or exists there already.
            Damaged: a copy is not what the manifest says.
            OSError: a file can't be written; the error names it.
        """
        ...

    def take(self, folder: Path, name: str, *, link: bool = False, stage: Stage) -> str:
        """Copy the step in a local folder, as it is, into this tier; returns the path or URL of the copy.

        Args:
            name: what messages call the tier.
            link: make hard links, where the tier is a folder.

        Raises:
            UsageError: the tier has steps of another run, or can't have links to the step.
            CheckpointError: the step is damaged, or the tier has another step of this number.
            OSError: a file can't be written; the error names it.
        """
        ...


def read_steps(tier: Tier, ratings: Ratings) -> list[SavedStep]:
    """The steps of a tier with their metrics; a step with a damaged manifest has none.

    Args:
        ratings: by evaluations, of the run's steps in any tier.
    """
    found: list[SavedStep] = []
    for number in tier.steps():
        try:
            found.append(SavedStep(number, ratings.metrics(tier.manifest(number)), ratings))
        except CheckpointError:
            found.append(SavedStep(number, {}))
    return found


def row_of(folder: Path, kept_by: list[str], ratings: Ratings | None = None) -> dict[str, Any]:
    """What `ckpt list` shows of a step in this folder."""
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return {"folder": str(folder), "state": f"damaged: {error}"}
    state = "complete" if manifest.parts != ["model"] else "complete, weights only"
    try:
        check_files(folder, manifest, content=False)
    except CheckpointError as error:
        state = f"damaged: {error}"
    fields = {"step", "branch", "created", "run_id", "attempt", "parent", "world_size", "metrics", "parts"}
    return {
        "folder": str(folder),
        "state": state,
        "kept_by": kept_by,
        "bytes": manifest.nbytes,
        **manifest.model_dump(include=fields),
        "metrics": ratings.metrics(manifest) if ratings else manifest.metrics,
    }
