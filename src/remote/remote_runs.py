"""Runs in an object store, as an upload (`ckpt.remote`) has left them: for whoever looks at runs.

What is there of a run are its settings (config.json), and metrics.jsonl, history.jsonl, evals.jsonl and its
steps, as of the newest upload. The small files and the steps' manifests are copied into a temporary folder,
where they are read as those of a run directory are. Rollouts, ledger, spans, logs, roles and batches stay on
the run's disk.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

from cairn.checkpoint.manifest import FILE_NAME
from cairn.remote import Objects, RemoteError, RemoteStore
from cairn.remote.client.objects import Listed
from cairn.remote.run_files import FOLDER, RunFiles
from cairn.remote.step_store import COMMITTED
from cairn.run.errors import UsageError
from cairn.run.files import write_atomic
from cairn.run.view import RunView

logger = logging.getLogger(__name__)

LOGS = ("metrics.jsonl", "history.jsonl", "evals.jsonl")
"""Each of these is a sign of a run, as it is in a run directory."""
MIRRORED = (*LOGS, "config.json")
"""The small files that are copied."""
SECONDS = 30.0
"""Between two looks at an object store, of whoever follows it."""


class RemoteRun:
    """The run below a URL, and the folder that its small files are copied into.

    Every method raises RemoteError if the object store refuses or fails.
    """

    def __init__(self, url: str, folder: Path):
        """Nothing is copied before `refresh`.

        Raises:
            UsageError: the URL can't be used.
        """
        self.steps = RemoteStore(Objects(url))
        self.folder = folder
        self._known: dict[str, str | None] = {}
        """ETags of what was copied, by name."""

    def __str__(self) -> str:
        return str(self.steps)

    def exists(self) -> bool:
        """Whether a run is there: its rows, its events or its results, or a step."""
        there = self.steps.objects.look(FOLDER)
        return any(f"{FOLDER}/{name}" in there for name in LOGS) or bool(self.steps.steps())

    def view(self) -> RunView:
        """What was copied, as a run directory; the steps are beside it, wherever the settings had them."""
        return RunView(self.folder, self.folder / "checkpoints")

    def refresh(self) -> None:
        """Copy what is new, and remove copies of what is gone."""
        objects = self.steps.objects
        self.folder.mkdir(parents=True, exist_ok=True)
        small, files = objects.look(FOLDER), RunFiles(objects)
        for name in MIRRORED:
            found, path = small.get(f"{FOLDER}/{name}"), self.folder / name
            if found is None:
                path.unlink(missing_ok=True)
            elif self._is_new(name, found) and (copies := files.copies(name)).all:
                for problem in copies.problems:
                    logger.warning("%s; what can be read of it is shown", problem)
                self._write(path, copies.all[0], found)
        listed = objects.look(COMMITTED)
        committed = {
            f"step_{step}": listed.get(f"{COMMITTED}/step_{step}.json") for step in self.steps.steps()
        }
        steps = self.folder / "checkpoints"
        steps.mkdir(exist_ok=True)
        for name, found in committed.items():
            if found is None or not self._is_new(name, found):
                continue
            if (content := objects.get(f"{COMMITTED}/{name}.json")) is not None:
                (steps / name).mkdir(exist_ok=True)
                self._write(steps / name / FILE_NAME, content, found)
        for path in steps.iterdir():
            if path.name not in committed:
                shutil.rmtree(path, ignore_errors=True)
                self._known.pop(path.name, None)

    def _is_new(self, name: str, found: Listed) -> bool:
        if self._known.get(name, "") == found.etag:
            return False
        self._known[name] = found.etag
        return True

    @staticmethod
    def _write(path: Path, content: bytes, found: Listed) -> None:
        """With the time at which it was put: by that, readers tell when the run was last at work."""
        write_atomic(path, content)
        os.utime(path, (found.modified.timestamp(), found.modified.timestamp()))


class RemoteRuns:
    """The run below a URL, or those in the folders directly below it, copied into a folder."""

    def __init__(self, url: str, folder: Path):
        """Nothing is copied before `refresh`.

        Raises:
            UsageError: the URL can't be used.
        """
        self.url = url.rstrip("/")
        self.folder = folder
        self.runs: dict[str, RemoteRun] = {}
        """By id: the name of the folder, or `.` for the URL itself."""

    def refresh(self) -> None:
        """Look for runs, and copy what is new of each.

        Raises:
            RemoteError: the object store refuses or fails.
        """
        own = self.runs.get(".") or RemoteRun(self.url, self.folder)
        found = {".": own} if own.exists() else {}
        if not found:
            for name in own.steps.objects.folders():
                one = self.runs.get(name) or RemoteRun(f"{self.url}/{name}", self.folder / name)
                if one.exists():
                    found[name] = one
        for one in found.values():
            one.refresh()
        self.runs = found

    def follow(self) -> None:
        """Refresh again and again, in a thread that ends with the process."""
        threading.Thread(target=self._follow, name="object store", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(SECONDS):
            try:
                self.refresh()
            except (RemoteError, OSError) as error:
                logger.warning("what is shown of %s may be old: %s", self.url, error)


@contextlib.contextmanager
def mirrored(url: str) -> Generator[RemoteRuns]:
    """The runs at a URL, whose copies last as long as the context.

    Raises:
        UsageError: the URL can't be used.
        RemoteError: the object store refuses or fails.
    """
    with tempfile.TemporaryDirectory(prefix="cairn-runs-") as folder:
        runs = RemoteRuns(url, Path(folder) / "runs")
        runs.refresh()
        yield runs


@contextlib.contextmanager
def remote_view(url: str) -> Generator[RunView]:
    """The view of the run at a URL, as of now.

    Raises:
        UsageError: the URL can't be used, or no run is there.
        RemoteError: the object store refuses or fails.
    """
    with mirrored(url) as runs:
        if "." not in runs.runs:
            below = f"; below it are {', '.join(sorted(runs.runs))}" if runs.runs else ""
            raise UsageError(
                f"{url}: there is no run: it has neither {FOLDER}/metrics.jsonl nor a step{below}. Give the "
                "URL that the run has as --ckpt.remote"
            )
        yield runs.runs["."].view()
