"""What the arguments of `ckpt` commands mean: folders and URLs of steps, or of other checkpoints."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, Damaged, load_manifest, split_step
from cairn.checkpoint.store import CheckpointStore, OneStep
from cairn.checkpoint.tiers import Tier
from cairn.config.shared import Place
from cairn.formats import format_of
from cairn.remote import Objects, RemoteStore
from cairn.remote.step_store import COMMITTED
from cairn.run.errors import UsageError
from cairn.run.file_system import flock, open_lock
from cairn.run.files import make_folders, naming
from cairn.run.output import Stage, progress_bars
from cairn.tools.ckpt_output import say

if TYPE_CHECKING:
    from cairn.run.view import RunView


ROOM, AT_WORK = ".cairn-", ".at-work"
"""Names of a command's folder for the time, and of the file in it that is locked while it is at work."""


def name_of(given: Place, step: Path) -> str:
    """What the user calls the step in the folder `step`, which is from `given`, or was made for it."""
    return str(step) if isinstance(given, Path) else f"{split(given)[0]}/{step.name}"


# Tiers


def split(url: str, *, new: bool = False) -> tuple[RemoteStore, int | None]:
    """The remote store that a URL leads into, and the step if it ends with the name of one.

    Args:
        new: whether the folder of a file URL may be missing, and is then made.

    Raises:
        UsageError: the URL can't be used.
    """
    place = urlsplit(url)
    if not new and place.scheme == "file" and not Path(unquote(place.path)).exists():
        raise UsageError(f"{url}: there is no such folder")
    prefix, step = split_step(url) or (url, None)
    return RemoteStore(Objects(prefix)), step


def tier_at(given: Place) -> tuple[Tier, int | None]:
    """The tier at a path or URL, and the step if the URL is of one; a step's folder is a tier of its own.

    Raises:
        UsageError: there are no checkpoints, or the URL can't be used.
    """
    if isinstance(given, str):
        return split(given)
    return (OneStep(given) if (given / FILE_NAME).exists() else store_in(given)), None


def run_at(given: Place) -> Tier:
    """The tier with the steps of a run.

    Raises:
        UsageError: there are no checkpoints, or the URL is of a single step.
    """
    if isinstance(given, Path):
        return store_in(given)
    remote, step = split(given)
    if step is not None:
        raise UsageError(f"{given}: is a single step; give the URL of the run, {remote}")
    return remote


def refuse_empty(tier: Tier, steps: Sized) -> None:
    """Refuse an object store without steps, unless something is left of some; `store_in` refuses folders.

    Args:
        steps: what was found there.

    Raises:
        UsageError: there are no checkpoints.
    """
    if steps or not isinstance(tier, RemoteStore) or tier.steps_aside() or next(tier.leftovers(), None):
        return
    raise UsageError(f"{tier}: there are no checkpoints here")


def step_at(given: Place) -> tuple[Tier, int]:
    """The tier and the number of a single step.

    Raises:
        UsageError: it is not a step, or there are several.
    """
    if isinstance(given, Path):
        return OneStep(step_folder(given)), 0
    remote, step = split(given)
    if step is None:
        found = remote.steps()
        example = f"{remote}/step_{found[-1]}" if found else "s3://bucket/prefix/step_20"
        raise UsageError(f"{given}: give one step, such as {example}")
    return remote, step


def tier_for_copies(dest: Place) -> Tier:
    """The tier into which steps are to be copied.

    Raises:
        UsageError: it is not a folder, or the URL of a step.
    """
    if isinstance(dest, Path):
        from cairn.checkpoint.fork import store_of_copies  # imports numpy, which --help has no time for

        return store_of_copies(dest)
    remote, step = split(dest, new=True)
    if step is not None:
        raise UsageError(f"{dest}: is the URL of a step; give that of a run, {remote}")
    return remote


def store_in(path: Path) -> CheckpointStore:
    """The store of a run directory or a checkpoints folder.

    Raises:
        UsageError: there are no checkpoints.
    """
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
    return next((dict(config) for view in _views(path) if (config := view.config())), {})


def attempt_id(path: Path) -> str:
    """The id of the newest attempt of the run that `path` is or lies in; empty if there is none."""
    return next((attempt.id for view in _views(path) if (attempt := view.attempt())), "")


def _views(path: Path) -> "tuple[RunView, ...]":
    """Of the folders that may be the run's: the path, and the one that it lies in."""
    from cairn.run.view import RunView  # imports numpy, which --help has no time for

    return RunView(path), RunView(path.absolute().parent)


# Steps as local folders


def step_folder(path: Path) -> Path:
    """The folder of a single step.

    Raises:
        UsageError: `path` is not a step, or holds several.
    """
    if not (path / FILE_NAME).exists():
        for root in (path / "checkpoints", path):
            if (latest := CheckpointStore(root).latest()) is not None:
                raise UsageError(f"{path}: give one step, such as {CheckpointStore(root).folder(latest)}")
        try:
            load_manifest(path)  # raises an error that says what is wrong
        except CheckpointError as error:
            raise UsageError(str(error)) from None
    return path


def step_in(path: Path) -> Path:
    """The step in `path`, or the newest good one of a run.

    Raises:
        UsageError: there is none.
    """
    if (path / FILE_NAME).exists():
        return path
    for root in (path / "checkpoints", path):
        folder, passed_over = CheckpointStore(root).newest_good(content=False)
        for problem in passed_over:
            say(f"passed over: {problem}")
        if folder is not None:
            return folder
    raise UsageError(f"{path}: is no checkpoint, and there are none in it")


def download(url: str, store: CheckpointStore, stage: Stage) -> Path:
    """Download a step, or the newest good one of a run, into a local store; returns its folder.

    Raises:
        CheckpointError: there is none, or the step is damaged, or the store has one of this number.
    """
    remote, step = split(url)

    def fetch(number: int) -> Path:
        done = stage(f"downloading step {number}", remote.manifest(number).nbytes)
        return remote.fetch(number, store, on_bytes=done)

    if step is not None:
        return fetch(step)
    steps = remote.steps()
    for number in reversed(steps):
        try:
            return fetch(number)
        except Damaged as error:
            say(f"passed over: {error}")
    raise CheckpointError(f"{url}: has no {'good ' if steps else ''}checkpoint")


def receive(url: str, store: CheckpointStore, stage: Stage) -> Path:
    """Copy a remote step, or the newest good one of a run, into a local store; returns the copy's folder.

    Raises:
        UsageError: the store is another run's.
        CheckpointError: there is no good step, or the store has one of this number.
    """
    remote, step = split(url)
    known = remote.steps() if step is None else [step]
    if not known:
        raise CheckpointError(f"{url}: has no checkpoint")
    with store.receiving(remote.manifest(known[-1]).run_id, url):
        return download(url, store, stage)


@contextlib.contextmanager
def local(given: Place, *, newest: bool = False, near: Place | None = None) -> Generator[Path]:
    """A local folder with a step, for commands that read all of it; a remote one is downloaded for the time.

    Args:
        newest: whether the URL of a run means its newest good step.
        near: what is made of the step; it is downloaded onto the same disk.

    Raises:
        UsageError: a URL does not end with the name of a step.
        CheckpointError: there is no such step, or it is damaged.
    """
    if isinstance(given, Path):
        yield given
        return
    if not newest:
        step_at(given)
    with temporary_folder(near) as folder, progress_bars() as stage:
        yield download(given, CheckpointStore(folder), stage)


@contextlib.contextmanager
def foreign(given: Place, near: Place | None) -> Generator[Path]:
    """A local copy of another program's checkpoint, which has no checksums: what arrives is checked by size.

    Args:
        near: what is made of it; it is downloaded onto the same disk.

    Raises:
        UsageError: there is nothing at the URL, or it is a checkpoint of Cairn.
    """
    if isinstance(given, Path):
        yield given
        return
    if urlsplit(given).scheme == "file":
        yield Path(unquote(urlsplit(given).path))
        return
    objects, alone = Objects(given), False
    names = [(name, size) for name, size in objects.list() if not name.endswith("/")]
    parent, _, last = given.rstrip("/").rpartition("/")
    if not names and not parent.endswith("/"):  # perhaps a single object, and no bucket
        objects, alone = Objects(parent), True
        size = objects.size(last)
        names = [] if size is None else [(last, size)]
    if not names:
        raise UsageError(f"{given}: there is no such object, and none below it")
    if any(name in (FILE_NAME, f"{COMMITTED}/{Path(name).name}") for name, _ in names):
        raise UsageError(f"{given}: is a checkpoint of Cairn; ckpt fork makes a new run of it")
    with temporary_folder(near) as folder, progress_bars() as stage:
        target = folder / last
        done = stage(f"downloading {given}", sum(size for _, size in names))
        for name, size in names:
            path = target if alone else target / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UsageError(f"{objects.url}/{name}: has a name that no file can have")
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), open(path, "wb") as file:
                for first in range(0, size, CHUNK_BYTES):
                    done(file.write(objects.read(name, first, min(CHUNK_BYTES, size - first))))
        yield target


@contextlib.contextmanager
def side(given: Place) -> Generator[Path]:
    """A local folder with a side of `ckpt diff`: a step, or another program's checkpoint.

    Raises:
        UsageError: it is a run, or there is nothing there.
    """
    is_step = isinstance(given, str) and split(given)[1] is not None
    is_run = isinstance(given, str) and not is_step and split(given)[0].steps()
    with local(given) if is_step or is_run else foreign(given, None) as folder:
        yield folder if format_of(folder) else step_folder(folder)


# What commands make


@contextlib.contextmanager
def new_folder(target: Place) -> Generator[Path]:
    """The path of a local folder to be made; if `target` is a URL, its files are uploaded there at the end.

    A folder appears as a whole. Objects below a URL appear one by one, so they are complete when the command
    has ended.

    Raises:
        UsageError: there are objects below the URL already.
    """
    if isinstance(target, Path):
        yield target
        return
    objects = Objects(target)
    if objects.list():
        raise UsageError(f"{target}: has objects already; give a new prefix")
    with temporary_folder(target) as room:
        yield room / "made"
        with progress_bars() as stage:
            objects.put_folder(room / "made", room / "sent", stage)


@contextlib.contextmanager
def new_run(target: Place) -> Generator[Path]:
    """The output folder of a new run; if `target` is a URL, the run's only step is uploaded there at the end.

    Raises:
        UsageError: the URL has a run already, or is of a step.
    """
    if isinstance(target, Path):
        yield target
        return
    tier = tier_for_copies(target)
    if tier.steps():
        raise UsageError(f"{target}: has checkpoints already; give a new prefix")
    with temporary_folder(target) as room:
        yield room / "run"
        store = CheckpointStore(room / "run" / "checkpoints")
        with progress_bars() as stage:
            for step in store.steps():
                tier.take(store.folder(step), str(target), stage=stage)


def flags_to_resume(target: Place) -> str:
    """The flags with which a run goes on that `new_run` has made."""
    remote = "" if isinstance(target, Path) else f"DIR --ckpt.remote {split(target)[0]}"
    return f"--output-dir {remote or target} --ckpt.resume latest"


@contextlib.contextmanager
def temporary_folder(near: Place | None) -> Generator[Path]:
    """A folder for the time, on the disk of what is made there if that is known and local."""
    parents = near.absolute().parents if isinstance(near, Path) else []
    disk = next((parent for parent in parents if parent.is_dir()), Path(tempfile.gettempdir()))
    with room_in(disk) as folder:
        yield folder


@contextlib.contextmanager
def room_in(parent: Path) -> Generator[Path]:
    """A folder in `parent` for the time; those are removed that killed commands have left there."""
    make_folders(parent)
    for left in parent.glob(f"{ROOM}*"):
        _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=ROOM, dir=parent) as name:
        path = Path(name) / AT_WORK
        lock = open_lock(path)
        try:
            flock(lock, fcntl.LOCK_EX, path)
            yield Path(name)
        finally:
            os.close(lock)


def _remove_if_left(room: Path) -> None:
    """Remove a room in which nobody is at work; one without a lock is only just being made."""
    try:
        lock = os.open(room / AT_WORK, os.O_RDWR)
    except OSError:
        return
    try:
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, room / AT_WORK)
        shutil.rmtree(room, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
