"""The checkpoint store: how a run's step_N folders are committed, set aside and deleted.

Each role and rank writes its part into the step's folder, then a receipt that lists what it wrote. Rank 0
waits for all receipts and writes the manifest last, which makes the step exist (`checkpoint.steps`).
"""

import contextlib
import datetime
import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.checkpoint.checksums import FileChecksum, merge_checksums
from cairn.checkpoint.manifest import (
    FILE_NAME,
    CheckpointError,
    FileEntry,
    Manifest,
    check_files,
)
from cairn.checkpoint.receipts import make_receipt, note_of, read_receipt
from cairn.checkpoint.step_index import StepFolders
from cairn.checkpoint.tensors.compression import check_tables
from cairn.run.faults import fault_point
from cairn.run.file_system import file_system_of, flock, open_lock
from cairn.run.files import check_written, make_folders, naming, sync, write_atomic, write_json
from cairn.run.waiting import wait_for

BEGUN = ".begun.json"


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
        checksums: dict[str, FileChecksum] = {}
        for name, content in files.items():
            make_folders((folder / name).parent)
            write_atomic(folder / name, content, durable=True)
            checksums[name] = FileChecksum(len(content))
            checksums[name].add(0, content)
        for where in {folder, *((folder / name).parent for name in files)}:
            sync(where)
        if read_back:
            for name, content in files.items():
                check_written(folder / name, content)
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
        on_poll: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Wait for all parts, then commit the step.

        Args:
            parts: the parts of the step, and the session or attempt id that each must carry.
            timeout: seconds to wait for a part.
            about: the manifest's fields other than step, files and created.
            read_back: read the manifest again from the disk and compare, before it counts.
            linked: files that are links to those of another step, and what the manifest there says of them.
            on_poll: called repeatedly while waiting; an error that it raises ends the wait.

        Raises:
            DeadlinePassed: a part did not arrive.
            CheckpointError: a linked file is not what the parts say.
        """
        checksums: dict[str, FileChecksum] = {}
        packed: dict[str, FileChecksum] = {}
        for part, writer in parts.items():
            content = wait_for(
                lambda part=part, writer=writer: on_poll() or self._arrived(step, part, writer),
                seconds=timeout,
                whom=f"the part of {part} in checkpoint {step}",
                setting="--ckpt.part-timeout",
            )
            merge_checksums(checksums, read_receipt(content))
            merge_checksums(packed, read_receipt(content, "contents"))
        entries = _file_entries(checksums)
        if other := sorted(name for name, entry in linked.items() if entries.get(name) != entry):
            raise CheckpointError(f"{self.folder(step) / other[0]}: is a link to a file of other values")
        fault_point("commit.before_manifest")
        manifest = Manifest(
            format=2 if packed else 1,
            step=step,
            files=entries,
            contents=_file_entries(packed),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **about,
        )
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

        def copy(folder: Path) -> None:
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

        return self.receive(manifest, copy)

    def receive(self, manifest: Manifest, fill: Callable[[Path], None]) -> Path:
        """Commit a step without the roles of a run; returns its folder.

        A failure leaves nothing behind; a process that is killed leaves debris, which the next call removes.

        Args:
            fill: writes the files that `manifest` lists into the folder that it is given, fsyncs them, and
                checks them against the manifest.

        Raises:
            CheckpointError: the step exists already, or a link or file has its name.
        """
        folder = self.folder(manifest.step)
        make_folders(self.root)
        self._check_free(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            fill(folder)
            for path in (*folder.rglob("*"), folder):
                if path.is_dir():
                    sync(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        fault_point("commit.before_manifest")
        self._publish(manifest)
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


def _file_entries(checksums: Mapping[str, FileChecksum]) -> dict[str, FileEntry]:
    return {name: FileEntry.of(c.size, c.chunks()) for name, c in sorted(checksums.items())}


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content; tolerates another process that does the same.

    Raises:
        OSError: something can't be removed, or `folder` is a symbolic link.
    """

    def unless_gone(_function: object, _path: str, error: "tuple[type, BaseException, object]") -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=unless_gone)
