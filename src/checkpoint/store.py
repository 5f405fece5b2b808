"""The store: the step_N folders of a run, and the one rule that says which of them exist.

A step exists if and only if its manifest.json does. Each role writes its own part into the step's folder and
then a small part file that lists what it wrote; the committer waits for all parts and writes the manifest
last. Whatever has no manifest is debris that no reader looks at.
"""

import datetime
import re
import shutil
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import (
    FILE_NAME,
    CheckpointError,
    Damaged,
    FileEntry,
    Manifest,
    Origin,
    check_files,
    describe,
    parse,
)
from cairn.run.files import read_json, sync, write_atomic, write_json
from cairn.run.waiting import wait_for

STEP_NAME = re.compile(r"step_([1-9][0-9]*)")


class CheckpointStore:
    """The checkpoints of one run, below `root`."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()

    def folder(self, step: int) -> Path:
        """Where step `step` lies, or would lie."""
        return self.root / f"step_{step}"

    # Reading

    def steps(self) -> list[int]:
        """The steps that exist, oldest first."""
        return [step for step in self._folders() if (self.folder(step) / FILE_NAME).exists()]

    def debris(self) -> list[Path]:
        """Folders of saves that were never committed."""
        return [self.folder(step) for step in self._folders() if not (self.folder(step) / FILE_NAME).exists()]

    def _folders(self) -> list[int]:
        if not self.root.exists():
            return []
        names = (STEP_NAME.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def newest_good(self) -> tuple[Path | None, list[str]]:
        """The newest step whose files are all as they were written, and what is wrong with newer ones."""
        passed_over = []
        for step in reversed(self.steps()):
            try:
                verify(self.folder(step))
                return self.folder(step), passed_over
            except CheckpointError as error:
                passed_over.append(str(error))
        return None, passed_over

    # Writing

    def begin_part(self, step: int, folders: list[str]) -> Path:
        """Empty `folders` of step `step` to write into, and return the step's folder.

        What an earlier, uncommitted attempt left in them is removed.

        Raises:
            CheckpointError: the step exists already.
        """
        folder = self.folder(step)
        if (folder / FILE_NAME).exists():
            raise CheckpointError(f"{folder} exists already and is never overwritten")
        for name in folders:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
        return folder

    def finish_part(self, step: int, part: str, folders: list[str], attempt: str) -> None:
        """Make a part's files durable and say that they are complete.

        Args:
            part: who wrote them: trainer or orchestrator.
            folders: the part's folders in the step's folder, all of whose files belong to it.
            attempt: id of the attempt that wrote them.
        """
        folder = self.folder(step)
        names = []
        for top in folders:
            for path in sorted((folder / top).rglob("*")):
                sync(path)
                if path.is_file():
                    names.append(path.relative_to(folder).as_posix())
            sync(folder / top)
        files = {name: entry.model_dump() for name, entry in describe(folder, names).items()}
        write_json(self._part_file(step, part), {"attempt": attempt, "files": files}, durable=True)

    def _part_file(self, step: int, part: str) -> Path:
        return self.folder(step) / f".{part}.part.json"

    def commit(
        self, step: int, parts: list[str], attempt: str, *, timeout: float, about: dict[str, Any]
    ) -> Manifest:
        """Wait for all `parts` of `attempt`, then make the step exist.

        Args:
            timeout: seconds to wait for a part.
            about: the manifest's fields other than step, parts and files.

        Raises:
            DeadlinePassed: a part did not arrive.
        """
        files: dict[str, FileEntry] = {}
        for part in parts:
            content = wait_for(
                lambda part=part: self._arrived(step, part, attempt),
                seconds=timeout,
                whom=f"the {part}'s part of checkpoint {step}",
                setting="--ckpt.part-timeout",
            )
            files |= {name: FileEntry(**entry) for name, entry in content["files"].items()}
        manifest = Manifest(
            step=step,
            parts=parts,
            files=files,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **about,
        )
        for part in parts:
            self._part_file(step, part).unlink()
        write_atomic(self.folder(step) / FILE_NAME, manifest.to_json(), durable=True)
        sync(self.root)
        return manifest

    def _arrived(self, step: int, part: str, attempt: str) -> dict[str, Any] | None:
        content = read_json(self._part_file(step, part))
        return content if content and content["attempt"] == attempt else None

    def set_aside_after(self, step: int, name: str) -> Path | None:
        """Move the steps after `step`, whole or half, out of every reader's sight.

        A run that goes on from an earlier step leaves its abandoned future under `abandoned/<name>`.
        Returns that folder, or None if there was nothing to move.
        """
        later = [number for number in self._folders() if number > step]
        if not later:
            return None
        aside = self.root / "abandoned" / name
        aside.mkdir(parents=True, exist_ok=True)
        for number in later:
            self.folder(number).rename(aside / self.folder(number).name)
        sync(aside)
        sync(self.root)
        return aside


def load_manifest(folder: Path) -> Manifest:
    """The manifest of one step_N folder.

    Raises:
        CheckpointError: the folder is no checkpoint, its save was never completed, or it can't be read.
    """
    path = folder / FILE_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        what = "its save was never completed" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a checkpoint: {what}") from None
    manifest = parse(text, str(path))
    match = STEP_NAME.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        raise Damaged(f"{path}: belongs to step {manifest.step}")
    return manifest


def verify(folder: Path, part: str = "") -> Manifest:
    """Check every file of a step (below the folder `part`, if given) against its manifest.

    Raises:
        Damaged: naming the file and the place.
    """
    manifest = load_manifest(folder)
    check_files(folder, manifest, part)
    return manifest


def origin(folder: Path) -> Origin:
    """Which step of which run the checkpoint in `folder` is."""
    manifest = load_manifest(folder)
    return Origin(run_id=manifest.run_id, step=manifest.step)
