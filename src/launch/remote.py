"""The object store behind a run's local checkpoints, as the launcher sees it before any role runs.

A run resumes from the nearest good step: the local one if it is whole, else the remote one, which is
downloaded into the local store first. A machine with an empty disk goes on in the same way.
"""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError, check_files
from cairn.checkpoint.remote import Objects, RemoteError, RemoteStore
from cairn.checkpoint.remote.probing import probe
from cairn.checkpoint.store import CheckpointStore, step_of
from cairn.config.ckpt import CkptConfig
from cairn.config.kinds import RunConfig
from cairn.run.addresses import is_url
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, write_atomic
from cairn.run.progress import progress_bars

FETCHED = "fetched"
"""Name of the folder in the run directory for a remote step of another run that this run starts from."""


def with_remote(config: RunConfig) -> RunConfig:
    """Download the step that the run should resume from, if it lies in an object store only.

    Returns:
        The configuration; a URL that it resumes from is replaced by a local folder.

    Raises:
        UsageError: the object store can't be used like this.
        RemoteError: it refuses or fails.
    """
    ckpt = config.ckpt
    if ckpt is None or not (ckpt.remote or (ckpt.resume and is_url(ckpt.resume))):
        return config
    run = config.run_directory()
    make_folders(run.path)
    if not run.lock():
        raise UsageError(f"--output-dir {config.output_dir}: another process is running in it")
    try:
        if ckpt.remote:
            with _looking_for("--ckpt.remote", ckpt.remote):
                _Nearest(run, ckpt, RemoteStore(Objects(ckpt.remote))).bring()
        if ckpt.resume and is_url(ckpt.resume):
            return config.sharing(ckpt=ckpt.model_copy(update={"resume": str(_fetched(run, ckpt.resume))}))
        return config
    finally:
        run.unlock()  # `begin` takes the lock again


def replaced(config: RunConfig, damaged: Path) -> bool:
    """Replace a local step that turned out to be damaged by the remote one; False if that is not possible.

    Raises:
        UsageError: the object store refuses or fails.
    """
    ckpt = config.ckpt
    if ckpt is None or ckpt.remote is None:
        return False
    with _looking_for("--ckpt.remote", ckpt.remote):
        nearest = _Nearest(config.run_directory(), ckpt, RemoteStore(Objects(ckpt.remote)))
        return nearest.replace(damaged)


def leave_branch(config: RunConfig, step: int) -> None:
    """Uncommit the remote steps after `step`, from which the run goes on in another way.

    Raises:
        RemoteError: the object store refuses or fails.
    """
    if config.ckpt is None or config.ckpt.remote is None:
        return
    remote = RemoteStore(Objects(config.ckpt.remote))
    name = f"after_step_{step}_{secrets.token_hex(4)}"
    if left := remote.set_aside_after(step, name):
        print(f"the remote checkpoints {', '.join(map(str, left))} are set aside: {remote}/abandoned/{name}")


def claim(config: RunConfig, attempt: Attempt) -> None:
    """Take the remote prefix for this attempt, so that no other run, and no older attempt, writes there.

    Raises:
        UsageError: it belongs to another run.
        RemoteError: the object store refuses or fails.
    """
    if config.ckpt is not None and config.ckpt.remote is not None:
        RemoteStore(Objects(config.ckpt.remote)).claim(attempt.run_id, attempt.id)


class _Nearest:
    """Looks for the nearest good step, and brings it here if it is a remote one."""

    def __init__(self, run: RunDirectory, ckpt: CkptConfig, remote: RemoteStore):
        self.run = run
        self.ckpt = ckpt
        self.remote = remote
        self.store = CheckpointStore(run.checkpoints)

    def bring(self) -> None:
        """Download the step to resume from into the local store, unless a local one will do."""
        probe(self.remote.objects, secrets.token_hex(4))
        owner = self.remote.owner()
        if owner is None:
            return
        if not self.ckpt.resumes:
            raise UsageError(
                f"--ckpt.remote {self.remote}: belongs to run {owner} already; go on with it with "
                "--ckpt.resume auto, or give another prefix"
            )
        own = self._own_run()
        if own not in (None, owner):
            raise UsageError(
                f"--ckpt.remote {self.remote}: belongs to run {owner}, but {self.run.path} is run {own}; "
                "give another prefix"
            )
        remote = self.remote.steps()
        candidates = [self.ckpt.resume_step]
        if self.ckpt.resume_step is None:
            candidates = sorted({*self.store.steps(), *remote}, reverse=True)
        for step in candidates:
            if step is not None and (self._is_good(step) or (step in remote and self._fetch(step))):
                return

    def replace(self, damaged: Path) -> bool:
        """Download a step in place of the local one in the folder `damaged`; False if there is none."""
        own = damaged.parent == self.store.root
        return own and step_of(damaged) in self.remote.steps() and self._fetch(step_of(damaged))

    def _is_good(self, step: int) -> bool:
        """Whether the local step is whole, as far as that is checked before ranks load it."""
        folder = self.store.folder(step)
        if not self.store.exists(step):
            return False
        try:
            check_files(folder, self.store.manifest(step), content=self.ckpt.verify != "off", tensors=False)
        except CheckpointError:
            return False
        return True

    def _fetch(self, step: int) -> bool:
        """Download a step in place of the local one, if there is one; False if it is damaged there, too."""
        print(f"downloading step {step} from {self.remote}", flush=True)
        folder = self.store.folder(step)
        if self.store.exists(step):
            aside = self.store.abandoned / f"damaged_{secrets.token_hex(4)}"
            make_folders(aside)
            folder.rename(aside / folder.name)
            print(f"the damaged local step {step} is now in {aside}", flush=True)
        try:
            manifest = self.remote.manifest(step)
            with progress_bars() as stage:
                self.remote.fetch(step, self.store, on_bytes=stage(f"step {step}", manifest.nbytes))
        except CheckpointError as error:
            print(f"passing over a remote checkpoint: {error}", flush=True)
            return False
        self._fetch_rows()
        return True

    def _fetch_rows(self) -> None:
        """Download the run's metrics and history, unless they are here."""
        for path in (self.run.metrics.path, self.run.history.path):
            if not path.exists() and (content := self.remote.objects.get(f"run/{path.name}")) is not None:
                write_atomic(path, content, durable=True)

    def _own_run(self) -> str | None:
        """The id of the run in the local directory; None if there is none."""
        if attempt := self.run.attempt():
            return attempt.run_id
        for step in reversed(self.store.steps()):
            with contextlib.suppress(CheckpointError):
                return self.store.manifest(step).run_id
        return None


def _fetched(run: RunDirectory, url: str) -> Path:
    """A local copy of the remote step with this URL, for a run that starts from it.

    Raises:
        UsageError: the URL does not end with the name of a step, or there is no such step.
    """
    prefix, _, name = url.rstrip("/").rpartition("/")
    number = name.removeprefix("step_")
    if name == number or not number.isdecimal():
        raise UsageError(f"--ckpt.resume {url}: must end with the name of a step, such as /step_20")
    store = CheckpointStore(run.path / FETCHED)
    remote = RemoteStore(Objects(prefix))
    with _looking_for("--ckpt.resume", url):
        wanted = remote.manifest(int(number))
        if store.exists(wanted.step) and store.manifest(wanted.step) == wanted:
            return store.folder(wanted.step)
        shutil.rmtree(store.root, ignore_errors=True)
        print(f"downloading {url}", flush=True)
        with progress_bars() as stage:
            return remote.fetch(wanted.step, store, on_bytes=stage(name, wanted.nbytes))


@contextlib.contextmanager
def _looking_for(flag: str, url: str) -> Iterator[None]:
    """Name the flag in errors of the object store.

    Raises:
        UsageError: the store refuses or fails, or a step is damaged or missing.
    """
    try:
        yield
    except (CheckpointError, RemoteError) as error:
        raise UsageError(f"{flag} {url}: {error}") from None
