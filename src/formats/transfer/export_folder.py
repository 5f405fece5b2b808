"""A folder of exported steps: which of a run's steps are in it, which still have to be, and which never will.

Each `step_N` in the folder was renamed into place when all of it was written, and says in RECORD what it was
made from. So what is done is a matter of what is on disk, and a process that exports may be killed at any
moment.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import FILE_NAME, STEP_NAME, CheckpointError, load_manifest
from cairn.checkpoint.step_folder import step_of
from cairn.checkpoint.step_jobs import StepJob
from cairn.checkpoint.store import CheckpointStore, remove_folder
from cairn.config.ckpt import ExportConfig
from cairn.formats import QUANTIZATIONS
from cairn.formats.base import WEIGHT_DTYPES, WriteOptions
from cairn.run.errors import UsageError
from cairn.run.file_system import flock, open_lock
from cairn.run.files import make_folders, read_note, sync, write_json
from cairn.run.history import History
from cairn.run.machine import bytes_of

logger = logging.getLogger(__name__)

RECORD = ".export.json"
"""Name of the file in an exported step that says what it was made from."""
FAILURES = ".exports.json"
"""Name of the file beside exported steps that says what could not be exported."""
UNFINISHED = ".unfinished"
"""Ends the name of a folder that is still being written."""
REMOVED = ".removed"
"""Ends the name of a folder that is being deleted."""
MOST_TRIES = 3
"""How often a step is tried to be exported in an attempt of a run."""


class InTheWay(CheckpointError):
    """Something else has the name of an export."""


@dataclass(frozen=True)
class Record:
    """What an exported step was made from; the content of RECORD.

    manifest: digest of the step's manifest, which stands for every byte of the step. options: those of
    `WriteOptions` that decide about the content.
    """

    run_id: str
    step: int
    manifest: str
    format: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a step could not be exported, and how often that was tried."""

    reason: str
    tries: int


@dataclass(frozen=True)
class ExportFailures:
    """The content of FAILURES: the steps that failed in an attempt of a run.

    given_up: why nothing more is exported in this attempt, if so.
    """

    attempt: str
    steps: dict[str, Failure] = field(default_factory=dict[str, Failure])
    given_up: str | None = None


class Exports:
    """The exports of a run's steps in one format, with the same options, as `step_N` in `folder`."""

    def __init__(self, folder: Path, name: str, options: WriteOptions):
        self.folder = folder
        self.name = name
        self.options = options
        self._done: dict[int, tuple[int, int]] = {}
        """The steps that were found to be done, with what identifies the files of their manifests."""

    def folder_of(self, step: int) -> Path:
        """Where the export of a step lies once it is done."""
        return self.folder / f"step_{step}"

    def record_of(self, step: Path) -> Record:
        """What the export of the step in the folder `step` says of itself.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        manifest = load_manifest(step)
        return Record(manifest.run_id, manifest.step, _digest(step), self.name, written_by(self.options))

    def is_done(self, step: Path) -> bool:
        """Whether the step in the folder `step` is exported.

        Raises:
            InTheWay: something else has the name of its export.
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        number = step_of(step)
        out = self.folder_of(number)
        if not os.path.lexists(out):
            self._done.pop(number, None)
            return False
        version = _version(step / FILE_NAME)
        if self._done.get(number) == version:
            return True
        wanted = self.record_of(step)
        found = read_note(out / RECORD, Record)
        if found != wanted:
            raise InTheWay(f"{out}: {_difference(found, wanted)}; remove it, or give another folder")
        if version is not None:
            self._done[number] = version
        return True

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Keep other processes from exporting into the folder; what killed ones left there is removed.

        Raises:
            UsageError: the folder can't be made, since something else is in its place.
            OSError: it can't be written to.
        """
        try:
            make_folders(self.folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{self.folder}: can't be made: {error.filename} is not a folder") from None
        path = self.folder / ".lock"
        fd = open_lock(path)
        try:
            flock(fd, fcntl.LOCK_EX, path)
            for folder in self.folder.iterdir():
                name, dot, suffix = folder.name.partition(".")
                if STEP_NAME.fullmatch(name) and dot + suffix in (UNFINISHED, REMOVED):
                    shutil.rmtree(folder, ignore_errors=True)
            yield
        finally:
            os.close(fd)

    def conflicts(self, run_id: str) -> list[str]:
        """What in the folder is in the way of exports of the run `run_id`, one sentence each."""
        wanted = Record(run_id, 0, "", self.name, written_by(self.options))
        found = {folder: read_note(folder / RECORD, Record) for folder in self._folders()}
        return [
            f"{folder}: {_difference(record, wanted)}"
            for folder, record in found.items()
            if record is None
            or (record.run_id, record.format, record.options) != (run_id, wanted.format, wanted.options)
        ]

    def set_aside_after(self, step: int, name: str) -> Path | None:
        """Move exports of steps after `step` to `abandoned/<name>`, where nobody takes them for the run's.

        Returns that folder, or None if there was nothing to move.
        """
        later = [folder for folder in self._folders() if step_of(folder) > step]
        aside = self.folder / "abandoned" / name
        for folder in later:
            aside.mkdir(parents=True, exist_ok=True)
            folder.rename(aside / folder.name)
        if not later:
            return None
        sync(aside)
        sync(self.folder)
        return aside

    def trim(self, keep: int | None) -> list[int]:
        """Delete all but the newest `keep` exports, and return the deleted ones; failures are logged.

        Args:
            keep: None keeps all.
        """
        deleted: list[int] = []
        for folder in self._folders()[: -keep if keep else 0]:
            if read_note(folder / RECORD, Record) is None:
                continue  # nothing of ours
            doomed = folder.with_name(folder.name + REMOVED)
            try:
                folder.rename(doomed)  # so that a half of it is never taken for a whole one
                remove_folder(doomed)
                deleted.append(step_of(folder))
            except OSError as error:
                logger.warning("could not delete the export %s: %s", folder, error)
        return deleted

    # What could not be exported

    def failures(self, attempt: str) -> ExportFailures:
        """What failed so far in this attempt of the run."""
        found = read_note(self.folder / FAILURES, ExportFailures)
        return found if found is not None and found.attempt == attempt else ExportFailures(attempt)

    def note_failure(self, attempt: str, step: int, reason: str, *, for_good: bool) -> Failure:
        """Record that exporting a step has failed once more; returns what is known of it now.

        Args:
            for_good: it is not tried again in this attempt.
        """
        so_far = self.failures(attempt)
        before = so_far.steps.get(str(step))
        tries = MOST_TRIES if for_good else before.tries + 1 if before else 1
        failure = Failure(reason, tries)
        self._write(ExportFailures(attempt, {**so_far.steps, str(step): failure}, so_far.given_up))
        return failure

    def give_up(self, attempt: str, reason: str) -> None:
        """Record that nothing more is exported in this attempt of the run."""
        self._write(ExportFailures(attempt, self.failures(attempt).steps, reason))

    def _write(self, failures: ExportFailures) -> None:
        with contextlib.suppress(OSError):  # the disk that can't take the export may not take this either
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / FAILURES, asdict(failures))

    def _folders(self) -> list[Path]:
        """The exported steps, oldest first."""
        try:
            found = [path for path in self.folder.iterdir() if STEP_NAME.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=step_of)


class RunExports(StepJob):
    """The exports that a run makes while it trains.

    Args:
        interval: export the steps that are multiples of it; None: all. last: the run's last step, which is
            exported in any case. keep: the newest exports that are kept; None: all.
        attempt: id of the attempt of the run.
    """

    done = "exported"

    def __init__(
        self,
        exports: Exports,
        store: CheckpointStore,
        *,
        interval: int | None,
        last: int,
        keep: int | None,
        max_waiting: int,
        attempt: str,
    ):
        super().__init__(store, max_waiting)
        self.exports = exports
        self.interval = interval
        self.last = last
        self.keep = keep
        self.attempt = attempt

    def due(self, steps: Iterable[int]) -> list[int]:
        due = sorted(n for n in steps if self.interval is None or n % self.interval == 0 or n == self.last)
        return due[-self.keep if self.keep else 0 :]

    def waiting(self) -> list[int]:
        failures = self.exports.failures(self.attempt)
        if failures.given_up is not None:
            return []
        tries = {int(step): failure.tries for step, failure in failures.steps.items()}
        missing = (step for step in self.missing() if tries.get(step, 0) < MOST_TRIES)
        return [step for step in missing if not os.path.lexists(self.exports.folder_of(step))]

    def missing(self) -> list[int]:
        return [step for step in self.due(self.store.steps()) if not self._is_done(self.store.folder(step))]

    def _is_done(self, step: Path) -> bool:
        try:
            return self.exports.is_done(step)
        except CheckpointError:  # damaged, deleted meanwhile, or in the way
            return False

    def newest_done(self) -> int:
        return max(set(self.due(self.store.steps())) - set(self.missing()), default=0)

    def give_up(self, reason: str) -> None:
        self.exports.give_up(self.attempt, reason)

    def by_worth(self, waiting: Collection[int]) -> list[int]:
        # The oldest are exported first: if the newest were spared, a step could be deleted while it is being
        # exported, and so could the next one, for ever.
        return sorted(waiting)

    def why_missed(self, spared: int, others: int) -> str:
        return (
            f"{spared} other steps wait already, as many as --ckpt.export.max-waiting allows, so retention "
            "deletes it"
        )

    def note_missed(self, history: History, step: int, reason: str) -> None:
        history.not_exported(step, reason)


def refuse_options(name: str, options: WriteOptions) -> None:
    """Check that the format `name` can be written with these options.

    Raises:
        UsageError: it can't.
    """
    if options.quantize is None:
        return
    if options.quantize not in QUANTIZATIONS.get(name, ()):
        raise UsageError(f"the format {name} has no quantisation {options.quantize}")
    if options.dtype is not None:
        raise UsageError("a quantisation and a data type can't both be asked for: give one of them")


def written_by(options: WriteOptions) -> dict[str, Any]:
    """The options that decide about the content of an export, by name."""
    return {
        option.name: value
        for option in fields(options)
        if not callable(value := getattr(options, option.name))
    }


def run_exports(config: ExportConfig, store: CheckpointStore, *, last: int, attempt: str) -> RunExports:
    """The exports of a run with these settings, of which `folder` is given.

    Args:
        last: the run's last step.
        attempt: id of the attempt of the run.
    """
    assert config.folder is not None, "the launcher settles it"
    options = WriteOptions(config.dtype and WEIGHT_DTYPES[config.dtype], quantize=config.quantize)
    if config.shard_size is not None:
        options = replace(options, max_file_bytes=bytes_of(config.shard_size))
    exports = Exports(Path(config.folder), config.format, options)
    return RunExports(
        exports,
        store,
        interval=config.interval,
        last=last,
        keep=config.keep,
        max_waiting=config.max_waiting,
        attempt=attempt,
    )


def _version(path: Path) -> tuple[int, int] | None:
    """Identifies a file as long as it is not replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _digest(step: Path) -> str:
    return hashlib.blake2b((step / FILE_NAME).read_bytes(), digest_size=16).hexdigest()


def _difference(found: Record | None, wanted: Record) -> str:
    """How an export differs from the one that is wanted, for people."""
    if found is None:
        return "exists, and is no export of a run"
    if found.run_id != wanted.run_id:
        return f"is an export of the run {found.run_id}, not of {wanted.run_id}"
    if found.format != wanted.format:
        return f"is an export as {found.format}, not as {wanted.format}"
    if found.options != wanted.options:
        keys = [k for k in (found.options | wanted.options) if found.options.get(k) != wanted.options.get(k)]
        return (
            f"is an export with {_in_words(found.options, keys)}, not with {_in_words(wanted.options, keys)}"
        )
    return "is an export of another step of that number"


def _in_words(options: Mapping[str, Any], keys: Iterable[str]) -> str:
    return ", ".join(f"{key} = {options.get(key)}" for key in keys)
