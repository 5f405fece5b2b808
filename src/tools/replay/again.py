"""Takes steps of a run again, in a run of its own that ends with them."""

import contextlib
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.fork import share_tensors
from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import CairnError
from cairn.run.files import make_folders, write_json
from cairn.run.history import latest_attempt
from cairn.run.output import saying
from cairn.run.processes import keeper_command, log_end
from cairn.run.view import RunView
from cairn.tools.ckpt_places import room_in
from cairn.tools.replay.recorded import RecordedRun, StepRange

RECORDED = "trainer"
"""The command that trains on recorded batches; other kinds of runs are started as they were."""


class ReplayFailed(CairnError):
    """The steps could not be taken again; the message has the end of the command's output."""


@contextlib.contextmanager
def taken_again(
    run: RecordedRun, stretch: StepRange, settings: Mapping[str, Any], work_dir: Path | None = None
) -> Generator[RunView]:
    """The run that has taken the steps again, and saved the last one; it is removed in the end.

    The checkpoint that it begins with is shared by hard links where that can be, and copied otherwise.

    Args:
        settings: the trainer's, beside where the run and its checkpoint are.
        work_dir: where its folder is made; None: beside the run directory, so that links can be made.

    Raises:
        UsageError: the run has not kept what is needed.
        ReplayFailed: the command failed.
    """
    batches = run.batches(stretch) if run.trains_on_batches else []
    parent = run.beside if work_dir is None else work_dir
    with room_in(parent) as room:
        again = room / "run"
        given = {**settings, "output_dir": str(again)}
        if stretch.start:
            _share(run, stretch.start, CheckpointStore(again / "checkpoints"))
            given["ckpt"] = {"resume_step": stretch.start}
        command = run.kind.command
        if run.trains_on_batches:
            command = RECORDED
            given["recorded_batches"] = str(room / "batches")
            (room / "batches").mkdir()
            for path in batches:
                # Its name in either folder is that of its step.
                share_tensors(path, room / "batches" / path.name)
        file = room / "settings.json"
        write_json(file, given)
        with saying(f"taking {stretch} again"):
            _run([str(Path(sys.executable).parent / command), "@", str(file)], _folder(run), room)
        yield RunView(again)


def _share(run: RecordedRun, step: int, store: CheckpointStore) -> None:
    make_folders(store.root)
    with store.alone():
        store.adopt(run.checkpoints.folder(step), run.checkpoints.manifest(step), share_tensors)


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
