"""The checkpoint store: how a run's step_N folders are committed, set aside and deleted.

Each role and rank writes its part into the step's folder, then a receipt that lists what it wrote. Rank 0
waits for all receipts and writes the manifest last, which makes the step exist (`checkpoint.steps`).
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.checkpoint.checksums import FileChecksum, make_receipt, merge_checksums, note_of, read_receipt
from cairn.checkpoint.eval_metrics import Ratings, ratings_in
from cairn.checkpoint.manifest import (
    FILE_NAME,
    CheckpointError,
    FileEntry,
    Manifest,
    check_files,
    load_manifest,
    new_manifest,
)
from cairn.checkpoint.step_folder import StepFolders, step_of, verify
from cairn.checkpoint.tensors.compression import check_tables
from cairn.checkpoint.tiers import Receiver, Removable, SavedStep, read_steps, row_of
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.file_system import file_system_of, flock, open_lock
from cairn.run.files import (
    DamagedFile,
    check_written,
    make_folders,
    naming,
    read_json,
    read_note,
    sync,
    write_atomic,
    write_json,
)
from cairn.run.output import Stage
from cairn.run.waiting import wait_for

BEGUN = ".begun.json"
PINS = "pins.json"


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a file."""
    shutil.copyfile(source, target)


class CheckpointStore(StepFolders):
    """The checkpoints of one run, in the folder `root`: how they are written, set aside and deleted."""

    def begin(self, step: int, folders: list[str], attempt: str | None = None) -> None:
        """Create empty `folders` in step `step`; files of an unfinished save in them are removed.

        Args:
            attempt: if given, `wait_for_begin` returns in other processes of this attempt.

        Raises:
            CheckpointError: the step exists already, or a link or file has its name.
        """
        folder = self.folder(step)
        self._check_free(folder)
        for name in folders:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
        if attempt is not None:
            write_json(folder / BEGUN, {"attempt": attempt})

    @staticmethod
    def _check_free(folder: Path) -> None:
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a link, but a step must be a real folder; move it away")
        if (folder / FILE_NAME).exists():
            raise CheckpointError(f"{folder} exists already; steps are never overwritten")

    def wait_for_begin(
        self, step: int, attempt: str, *, timeout: float, on_poll: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until rank 0 has created the folders of step `step`.

        `on_poll` is called repeatedly while waiting; an error that it raises ends the wait.

        Raises:
            DeadlinePassed: rank 0 did not create them within `timeout` seconds.
        """
        wait_for(
            lambda: on_poll() or note_of(attempt, self.folder(step) / BEGUN),
            seconds=timeout,
            whom=f"rank 0 to begin checkpoint {step}",
            setting="--ckpt.part-timeout",
        )

    def receipt_file(self, step: int, part: str) -> Path:
        """The receipt of a part; the file exists until the step is committed."""
        return self.folder(step) / f".{part}.part.json"

    def write_part(
        self, step: int, part: str, files: Mapping[str, bytes], attempt: str, *, read_back: bool = False
    ) -> None:
        """Write a part that consists of small files, by name within the step, and its receipt; all fsynced.

        Args:
            read_back: read the files again from the disk and compare, before the part counts.
        """
        folder = self.folder(step)
        checksums = write_files(folder, files, read_back=read_back)
        for where in {folder, *((folder / name).parent for name in files)}:
            sync(where)
        write_json(self.receipt_file(step, part), make_receipt(attempt, checksums), durable=True)

    def commit(
        self,
        step: int,
        parts: Mapping[str, str],
        *,
        timeout: float,
        about: dict[str, Any],
        read_back: bool = False,
        linked: Mapping[str, FileEntry] = MappingProxyType({}),
        on_poll: Callable[[str], None] = lambda part: None,
    ) -> Manifest:
        """Wait for all parts, then commit the step.

        Args:
            parts: the parts of the step, and the session or attempt id that each must carry.
            timeout: seconds to wait for a part.
            about: the manifest's fields other than step, files and created.
            read_back: read the manifest again from the disk and compare, before it counts.
            linked: files that are links to those of another step, and what the manifest there says of them.
            on_poll: called repeatedly with a part that is not there; an error that it raises ends the wait.

        Raises:
            DeadlinePassed: a part did not arrive.
            CheckpointError: a linked file is not what the parts say.
        """
        checksums: dict[str, FileChecksum] = {}
        packed: dict[str, FileChecksum] = {}
        for part, writer in parts.items():
            content = wait_for(
                lambda part=part, writer=writer: self._arrived(step, part, writer) or on_poll(part),
                seconds=timeout,
                whom=f"the part of {part} in checkpoint {step}",
                setting="--ckpt.part-timeout",
            )
            merge_checksums(checksums, read_receipt(content))
            merge_checksums(packed, read_receipt(content, "contents"))
        manifest = new_manifest(step, checksums, about, packed)
        if other := sorted(name for name, entry in linked.items() if manifest.files.get(name) != entry):
            raise CheckpointError(f"{self.folder(step) / other[0]}: is a link to a file of other values")
        fault_point("commit.before_manifest")
        self._publish(manifest, read_back=read_back)
        return manifest

    def adopt(
        self,
        source: Path,
        manifest: Manifest,
        transfer: Callable[[Path, Path], object] = copy_file,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> Path:
        """Commit a step with copies of files from elsewhere, as for a fork; returns its folder.

        Args:
            source: the folder with the files that `manifest` lists.
            transfer: makes the second file of the first; `os.link` makes it another name of the same file.
            on_bytes: called with the number of bytes of each file that is there, for a progress bar.

        Raises:
            CheckpointError: the step exists already, or a link or file has its name.
            Damaged: a copy differs from what the manifest says.
            OSError: a file can't be written; the error names it.
        """
        return self.receive(manifest, partial(_copy, source, manifest, transfer, on_bytes))

    def receive(self, manifest: Manifest, fill: Callable[[Path], None]) -> Path:
        """Commit a step whose manifest is known; see `make`.

        Args:
            fill: writes the files that `manifest` lists into the folder that it is given, fsyncs them, and
                checks them against the manifest.
        """

        def filled(folder: Path) -> Manifest:
            fill(folder)
            return manifest

        return self.make(manifest.step, filled)

    def make(self, step: int, fill: Callable[[Path], Manifest], *, read_back: bool = False) -> Path:
        """Commit a step without the roles of a run; returns its folder.

        A failure leaves nothing behind; a process that is killed leaves debris, which the next call removes.

        Args:
            fill: writes the files into the folder that it is given, fsyncs them, and returns their manifest.
            read_back: read the manifest again from the disk and compare, before it counts.

        Raises:
            CheckpointError: the step exists already, or a link or file has its name.
        """
        folder = self.folder(step)
        make_folders(self.root)
        self._check_free(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            manifest = fill(folder)
            for path in (*folder.rglob("*"), folder):
                if path.is_dir():
                    sync(path)
            fault_point("commit.before_manifest")
            self._publish(manifest, read_back=read_back)
        except BaseException:
            if not self.exists(step):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _publish(self, manifest: Manifest, *, read_back: bool = False) -> None:
        """Write the manifest, which makes the step exist. All its other files must be durable."""
        folder = self.folder(manifest.step)
        self._remove_leftovers(folder, set(manifest.files))
        temporary = folder / f".{FILE_NAME}"
        with naming(folder / FILE_NAME):
            temporary.write_bytes(manifest.to_json())
            sync(temporary)
        if read_back:
            check_written(temporary, manifest.to_json())
        fault_point("commit.manifest_written")
        temporary.rename(folder / FILE_NAME)
        sync(folder)
        sync(self.root)
        fault_point("commit.done")
        for path in folder.glob(".*"):  # receipts and temporary files
            path.unlink(missing_ok=True)

    @staticmethod
    def _remove_leftovers(folder: Path, wanted: set[str]) -> None:
        """Remove files of an earlier, unfinished save of the same step that this save does not have."""
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in wanted and not name.startswith("."):
                path.unlink()

    def has_part(self, step: int, part: str, attempt: str) -> bool:
        """Whether this attempt has written that part, or the step is committed already."""
        arrived = self._arrived(step, part, attempt) is not None
        return arrived or self.exists(step)  # in this order, because a commit removes receipts at its end

    def _arrived(self, step: int, part: str, attempt: str) -> dict[str, Any] | None:
        return note_of(attempt, self.receipt_file(step, part))

    def delete(self, step: int) -> None:
        """Delete a step: first its manifest, so that it no longer exists, then the rest.

        Another process may delete it at the same time.
        """
        fault_point("retention.before_delete")
        folder = self.folder(step)
        with contextlib.suppress(FileNotFoundError):
            (folder / FILE_NAME).unlink()
            sync(folder)
        fault_point("retention.manifest_deleted")
        remove_folder(folder)

    # What `ckpt` and retention ask every tier

    def name_of(self, step: int) -> str:
        return str(self.folder(step))

    def check(self, step: int) -> None:
        self.verify(step)

    def verify(self, step: int, *, on_bytes: Callable[[int], None] = lambda count: None) -> Manifest:
        return verify(self.folder(step), on_bytes=on_bytes)

    def ratings(self) -> Ratings:
        return ratings_in(self.root)

    def measured(self, metric: str | None) -> list[SavedStep]:
        if metric is None:
            return [SavedStep(step, {}) for step in self.steps()]
        return read_steps(self, self.ratings())

    def rows(
        self, metric: str | None = None, kept_by: Mapping[int, list[str]] | None = None
    ) -> list[dict[str, Any]]:
        """What `ckpt list` shows: steps, then unfinished saves, abandoned steps and links."""
        ratings, aside = self.ratings(), sorted(self.abandoned.glob("*/step_*"))
        return [
            *(row_of(self.folder(step), (kept_by or {}).get(step, []), ratings) for step in self.steps()),
            *({"folder": str(folder), "state": "partial"} for folder in self.debris()),
            *({**row_of(folder, []), "state": f"abandoned ({folder.parent.name})"} for folder in aside),
            *(
                {"folder": str(link), "state": f"not a step: link to {link.readlink()}"}
                for link in self.links()
            ),
        ]

    def pins(self) -> set[int]:
        try:
            return set(read_json(self.root / PINS, list[int]) or [])
        except DamagedFile as error:
            raise CheckpointError(f"{error}; it must be a list of steps: repair or remove it") from None

    def set_pin(self, step: int, pinned: bool) -> None:
        """Pin a step, so that it is kept for ever, or remove the pin."""
        with self.alone():
            wanted = self.pins() | {step} if pinned else self.pins() - {step}
            write_json(self.root / PINS, sorted(wanted), durable=True)

    def useless_debris(self) -> list[Removable]:
        """Saves that were never completed; not those after the newest step, which may be in progress."""
        newest = self.latest() or 0
        return [
            Removable(str(folder), partial(remove_folder, folder))
            for folder in self.debris()
            if step_of(folder) < newest
        ]

    def abandoned_branches(self) -> list[Removable]:
        """The folders of abandoned steps; not symbolic links, since their targets are not the run's."""
        if self.abandoned.is_symlink() or not self.abandoned.is_dir():
            return []
        folders = [path for path in self.abandoned.iterdir() if path.is_dir() and not path.is_symlink()]
        return [Removable(str(folder), partial(remove_folder, folder)) for folder in sorted(folders)]

    def fetch(
        self, step: int, store: Receiver, *, on_bytes: Callable[[int], None] = lambda count: None
    ) -> Path:
        manifest = self.manifest(step)
        return store.receive(manifest, partial(_copy, self.folder(step), manifest, copy_file, on_bytes))

    def take(self, folder: Path, name: str, *, link: bool = False, stage: Stage) -> str:
        """Copy the step in a folder, as it is, into this store; returns the path of the copy.

        Args:
            name: the folder that was given for the copies, as messages call it.
            link: make hard links: the files take no space, and damage to one is damage to both.

        Raises:
            UsageError: the store has steps of another run, or can't have hard links to the step.
            CheckpointError: the step is damaged, or the store has a step of this number.
            OSError: a file can't be written; the error names it.
        """
        manifest = verify(folder, on_bytes=stage(f"verifying {folder.name}", load_manifest(folder).nbytes))
        if folder.resolve() in (target := self.root.resolve(), *target.parents):
            raise UsageError(f"{name}: is inside the checkpoint itself; give another folder")
        with self.receiving(manifest.run_id, str(folder)):
            progress = stage("linking" if link else "copying", manifest.nbytes)
            try:
                return str(self.adopt(folder, manifest, os.link if link else copy_file, progress))
            except OSError as error:
                if link and error.errno in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise UsageError(
                        f"{name}: hard links to {folder} can't be made there ({error.strerror}); leave out "
                        "--link"
                    ) from None
                raise

    @contextlib.contextmanager
    def receiving(self, run_id: str, name: str) -> Generator[None]:
        """Within this context, a step of a run, which messages call `name`, may be copied into the store.

        Raises:
            UsageError: it has steps of another run.
        """
        make_folders(self.root)
        with self.alone():
            if others := self._run_ids() - {run_id}:
                raise UsageError(
                    f"{self.root}: holds the run {', '.join(sorted(others))}, and {name} is of run {run_id}, "
                    "which would go on as that; give another folder, or make a new run of it with ckpt fork"
                )
            yield

    def _run_ids(self) -> set[str]:
        """The ids of the runs that the store has steps of, or that have begun in the folder around it."""
        found: set[str] = set()
        for step in self.steps():
            with contextlib.suppress(CheckpointError):  # it is damaged, and whose it was is not known
                found.add(self.manifest(step).run_id)
        roles = read_note(self.root.parent / "roles.json", dict[str, Any]) or {}
        return found | ({str(roles["run_id"])} if "run_id" in roles else set())

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Hold the lock that `ckpt` commands take before they change anything; saving does not take it."""
        shared = file_system_of(self.root).is_network
        path = self.root / ".lock" if shared else self.root
        fd = open_lock(path) if shared else os.open(path, os.O_RDONLY)
        try:
            flock(fd, fcntl.LOCK_EX, path)
            yield
        finally:
            os.close(fd)

    def set_aside_after(self, step: int, name: str) -> Path | None:
        """Move the steps after `step` to `abandoned/<name>`, where no reader looks, and remove later debris.

        Returns that folder, or None if there was nothing to move.
        """
        later = [number for number in self._folders() if number > step]
        aside = self.abandoned / name
        for number in later:
            if not self.exists(number):
                shutil.rmtree(self.folder(number), ignore_errors=True)
                continue
            aside.mkdir(parents=True, exist_ok=True)
            self.folder(number).rename(aside / self.folder(number).name)
        if not aside.exists():
            return None
        sync(aside)
        sync(self.root)
        return aside


def _copy(
    source: Path,
    manifest: Manifest,
    transfer: Callable[[Path, Path], object],
    on_bytes: Callable[[int], None],
    folder: Path,
) -> None:
    """Copy a step's files into `folder`, fsync them, and check them; see `CheckpointStore.adopt`."""
    for name, entry in manifest.files.items():
        fault_point("adopt.file")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with naming(target):
            transfer(source / name, target)
            sync(target)
        on_bytes(entry.size)
    check_files(folder, manifest)
    check_tables(folder, manifest.contents)


class OneStep(CheckpointStore):
    """A single step's folder, whatever its name, for commands that take several steps or one."""

    def __init__(self, folder: Path):
        super().__init__(folder.absolute().parent)
        self._only = folder

    def folder(self, step: int) -> Path:
        return self._only

    def steps(self) -> list[int]:
        """The number 0, which stands for the step: its own is in the manifest, which may be damaged."""
        return [0]

    def rows(
        self, metric: str | None = None, kept_by: Mapping[int, list[str]] | None = None
    ) -> list[dict[str, Any]]:
        """The step's row, with the metrics in its manifest."""
        return [row_of(self._only, [])]


def write_files(
    folder: Path, files: Mapping[str, bytes], *, read_back: bool = False
) -> dict[str, FileChecksum]:
    """Write small files, by name in `folder`, and fsync them; returns their checksums.

    Args:
        read_back: read the files again from the disk and compare.
    """
    checksums: dict[str, FileChecksum] = {}
    for name, content in files.items():
        make_folders((folder / name).parent)
        write_atomic(folder / name, content, durable=True)
        checksums[name] = FileChecksum.of(content)
    if read_back:
        for name, content in files.items():
            check_written(folder / name, content)
    return checksums


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content; tolerates another process that does the same.

    Raises:
        OSError: something can't be removed, or `folder` is a symbolic link.
    """

    def unless_gone(_function: object, _path: str, error: "tuple[type, BaseException, object]") -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=unless_gone)
