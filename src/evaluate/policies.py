"""The policies that `eval` evaluates: steps of runs, here or in an object store, and any models."""

import contextlib
import hashlib
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest, load_manifest
from cairn.checkpoint.step_folder import StepFolder, TrainerRecord
from cairn.checkpoint.step_index import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.config.evaluate import EvaluateConfig
from cairn.config.model import ModelConfig
from cairn.launch.plan.model import is_step, resolve_model
from cairn.model.adapters import is_adapter
from cairn.remote import RemoteStore
from cairn.run.addresses import is_url
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.imports import importing
from cairn.run.messages import PolicyName
from cairn.run.progress import progress_bars
from cairn.tools.ckpt_places import split, store_in

SERVED = "eval-"
"""What the names begin with under which servers get policies from `eval`."""


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
        from cairn.formats.transfer.convert import convert

    folder = near / "merged"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with progress_bars() as stage:
            convert(adapter, folder, "peft", stage=stage)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def policies_of(config: EvaluateConfig) -> list[Policy]:
    """What the settings name, in their order; models on the hub are fetched.

    Raises:
        UsageError: nothing is named, or there is no such model or step.
    """
    named = [("--model.name", config.model.name)] if config.model.name else []
    named += [("--models", name) for name in config.models]
    found = [policy for flag, name in named for policy in _policy(flag, name, config.model)]
    if config.all is not None:
        found += _all_of(config.all)
    if not found:
        raise UsageError(
            "eval needs a model: --model.name with a step's folder, RUN_DIR, a Hugging Face folder or a "
            "name on the hub; --models for several; or --all RUN_DIR for all steps of a run"
        )
    return list({policy.digest: policy for policy in found}.values())


def _policy(flag: str, name: str, model: ModelConfig) -> Iterator[Policy]:
    with _about(flag, name):
        if is_url(name):
            remote, step = split(name)
            steps = remote.steps()
            if not steps:
                raise UsageError(f"{flag} {name}: there are no checkpoints")
            yield _remote(name, remote, steps[-1] if step is None else step)
            return
        path = Path(name)
        if _is_run(path):
            newest, damaged = store_in(path).newest_good(content=False)
            if newest is None:
                raise UsageError(f"{flag} {name}: no step is whole: {'; '.join(damaged)}")
            yield _step(str(newest), newest)
        elif path.is_dir() and is_step(path):
            yield _step(name, path)
        elif path.is_dir() and (step := StepFolder.holding(path.absolute())):
            yield _step(name, step)
        else:
            yield _other(name, Path(resolve_model(model.model_copy(update={"name": name}))))


def _all_of(name: str) -> list[Policy]:
    with _about("--all", name):
        if is_url(name):
            remote, step = split(name)
            if step is not None:
                raise UsageError(f"--all {name}: is a single step; give the URL of the run, {remote}")
            found = [_remote(f"{remote}/step_{number}", remote, number) for number in remote.steps()]
        else:
            if not Path(name).is_dir():
                raise UsageError(f"--all {name}: there is no such folder; give a run directory")
            store = store_in(Path(name))
            folders = [store.folder(number) for number in store.steps()]
            found = [_step(str(folder), folder) for folder in folders]
    if not found:
        raise UsageError(f"--all {name}: there are no checkpoints")
    return found


@contextlib.contextmanager
def _about(flag: str, name: str) -> Iterator[None]:
    """Name the flag in errors of checkpoints."""
    try:
        yield
    except CheckpointError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _is_run(path: Path) -> bool:
    """Whether `path` is a run directory, or the folder of its checkpoints, and no model by itself."""
    if not path.is_dir() or is_step(path):
        return False
    if _is_of_run(path):
        return True
    is_model = (path / "config.json").is_file()
    stores = CheckpointStore(path / "checkpoints"), CheckpointStore(path)
    return not is_model and any(store.steps() for store in stores)


def _is_of_run(path: Path) -> bool:
    return RunDirectory(path).roles.is_file()


def _step(given: str, folder: Path) -> Policy:
    folder = folder.absolute()
    manifest = load_manifest(folder)
    run = next((RunDirectory(path) for path in folder.parents[:2] if _is_of_run(path)), None)
    return _of_run(given, manifest, folder, run)


def _remote(given: str, remote: RemoteStore, step: int) -> Policy:
    return _of_run(given, remote.manifest(step), remote, None)


def _of_run(given: str, manifest: Manifest, source: Path | RemoteStore, run: RunDirectory | None) -> Policy:
    digest = hashlib.blake2b(manifest.to_json(), digest_size=8).hexdigest()
    label = "-".join(filter(None, (run.path.name if run else "run", manifest.run_id, manifest.branch)))
    return Policy(given, manifest.step, manifest.run_id, manifest.branch, digest, label, source, run)


def _other(given: str, folder: Path) -> Policy:
    """A model that is no step: identified by the names, sizes and times of its files."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
    name = Path(given).absolute().name if Path(given).exists() else given.replace("/", "-")
    return Policy(given, 0, None, None, digest.hexdigest(), f"{name}-{digest.hexdigest()[:8]}", folder)
