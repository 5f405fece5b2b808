"""The policies that `eval` evaluates: steps of runs, here or in an object store, and any models."""

import contextlib
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, load_manifest
from cairn.checkpoint.step_folder import StepFolder, TrainerRecord, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.inference.servers import SERVED
from cairn.model.adapters import is_adapter
from cairn.remote import RemoteStore
from cairn.run.directory import RunDirectory
from cairn.run.messages import PolicyName
from cairn.run.output import importing, progress_bars


@dataclass(frozen=True)
class Policy:
    """A policy to evaluate.

    given: what the user called it. step: its optimiser steps; 0 for a model that is no step of a run. run_id,
    branch: of the run; None for other models. digest: of its content. label: names it in folders and tables.
    source: the folder of the step or model, or the object store that has the step. run: the run directory
    that it lies in.
    """

    given: str
    step: int
    run_id: str | None
    branch: str | None
    digest: str
    label: str
    source: Path | RemoteStore
    run: RunDirectory | None = None

    @property
    def name(self) -> PolicyName:
        """The name under which servers get it, and its answers are recorded."""
        return PolicyName(f"{SERVED}{self.digest}", self.branch or "", self.step)

    @contextlib.contextmanager
    def local(self, near: Path) -> Generator[Path]:
        """Its Hugging Face directory; a step is verified, byte by byte.

        Args:
            near: folder into which a remote step is downloaded for the time.

        Raises:
            CheckpointError: the step is damaged, or was deleted meanwhile.
        """
        if isinstance(self.source, RemoteStore):
            store = CheckpointStore(near)
            nbytes = self.source.manifest(self.step).nbytes
            with progress_bars() as stage:
                if store.exists(self.step):
                    store.delete(self.step)
                done = stage(f"downloading step {self.step}", nbytes)
                folder = self.source.fetch(self.step, store, on_bytes=done)
            try:
                model = StepFolder(folder).model
                if is_adapter(model):
                    raise CheckpointError(
                        f"{self.given}: step {self.step} holds an adapter; fetch it with ckpt copy, and "
                        "give the folder"
                    )
                yield model
            finally:
                store.delete(self.step)
        elif self.run_id is None:
            yield self.source
        else:
            nbytes = load_manifest(self.source).nbytes
            with progress_bars() as stage:
                verify(self.source, on_bytes=stage(f"verifying step {self.step}", nbytes))
            model = StepFolder(self.source).model
            with _merged(model, near) if is_adapter(model) else contextlib.nullcontext(model) as whole:
                yield whole

    def recipe(self, model: Path) -> dict[str, Any]:
        """The trainer's part of the recipe of the step whose Hugging Face directory is `model`, or empty."""
        folder = StepFolder.holding(model)
        if folder is None and self.run_id is not None and isinstance(self.source, Path):
            folder = self.source
        record = StepFolder(folder).trainer_state() if folder else None
        return (record or TrainerRecord()).recipe or {}


@contextlib.contextmanager
def _merged(adapter: Path, near: Path) -> Generator[Path]:
    """The whole model of an adapter, in the folder `near` as long as the context lasts."""
    with importing():
        from cairn.formats.transfer.import_step import convert

    folder = near / "merged"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with progress_bars() as stage:
            convert(adapter, folder, "peft", stage=stage)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
