"""Takes steps of a run again, in a run of its own that ends with them."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

from cairn.checkpoint.fork import share_tensors
from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import CairnError
from cairn.run.file_system import flock, open_lock
from cairn.run.files import make_folders, write_json
from cairn.run.history import latest_attempt
from cairn.run.output import saying
from cairn.run.processes import keeper_command, log_end
from cairn.run.view import RunView
from cairn.tools.replay.recorded import RecordedRun, StepRange

PREFIX, LOCK = ".cairn-replay-", ".lock"
"""Names of a replay's folder, and of the file in it that is locked while the replay is at work."""
RECORDED = "trainer"
"""The command that trains on recorded batches; other kinds of runs are started as they were."""


class ReplayFailed(CairnError):
    """The steps could not be taken again; the message has the end of the command's output."""


@contextlib.contextmanager
def taken_again(
    run: RecordedRun, stretch: StepRange, *, workers: int | None = None, work_dir: Path | None = None
) -> Generator[RunView]:
    """The run that has taken the steps again, and saved the last one; it is removed in the end.

    The checkpoint that it begins with is shared by hard links where that can be, and copied otherwise.

    Args:
        workers: the number of ranks; None: as many as took the steps.
        work_dir: where its folder is made; None: beside the run directory, so that links can be made.

    Raises:
        UsageError: the run has not kept what is needed.
        ReplayFailed: the command failed.
    """
    batches = run.batches(stretch) if run.trains_on_batches else []
    parent = run.path.absolute().parent if work_dir is None else work_dir
    with room_in(parent) as room:
        again = room / "run"
        settings = run.settings(stretch) | {"output_dir": str(again)}
        settings["workers"] = workers or run.world_size(stretch)
        if stretch.start:
            _share(run, stretch.start, CheckpointStore(again / "checkpoints"))
            settings["ckpt"] = {"resume_step": stretch.start}
        command = run.kind.command
        if run.trains_on_batches:
            command = RECORDED
            settings["recorded_batches"] = str(room / "batches")
            (room / "batches").mkdir()
            for path in batches:
                # Its name in either folder is that of its step.
                _link(path, room / "batches" / path.name)
        file = room / "settings.json"
        write_json(file, settings)
        with saying(f"taking {stretch} again"):
            _run([str(Path(sys.executable).parent / command), "@", str(file)], _folder(run), room)
        yield RunView(again)


@contextlib.contextmanager
def room_in(parent: Path) -> Generator[Path]:
    """A folder for the time; those are removed that replays left which were killed."""
    make_folders(parent)
    for left in parent.glob(f"{PREFIX}*"):
        _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name:
        path = Path(name) / LOCK
        lock = open_lock(path)
        try:
            flock(lock, fcntl.LOCK_EX, path)
            yield Path(name)
        finally:
            os.close(lock)


def _remove_if_left(room: Path) -> None:
    """Remove a room in which nobody is at work; one without a lock is only just being made."""
    try:
        lock = os.open(room / LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, room / LOCK)
        shutil.rmtree(room, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _share(run: RecordedRun, step: int, store: CheckpointStore) -> None:
    make_folders(store.root)
    with store.alone():
        store.adopt(run.store.folder(step), run.store.manifest(step), share_tensors)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _folder(run: RecordedRun) -> Path:
    """Where the run was started: paths in its settings may begin there."""
    folder = Path(str((latest_attempt(run.history) or {}).get("folder") or ""))
    return folder if folder.is_dir() else Path.cwd()


def _run(command: list[str], folder: Path, room: Path) -> None:
    """Run a command that dies with this process, however it dies.

    Raises:
        ReplayFailed: it failed, or was stopped.
    """
    log = room / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            keeper_command(0, command, on_term="kill"),
            stdin=subprocess.PIPE,  # held open for as long as this process lives
            stdout=out,
            stderr=out,
            cwd=folder,
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            code = process.wait()
        finally:
            process.stdin.close()
            process.wait()
    if code:
        raise ReplayFailed(f"the steps could not be taken again (exit code {code}):\n{log_end(log, 20)}")
