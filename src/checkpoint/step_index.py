"""The step_N folders of a run, and the rule that says which of them exist.

A step exists if and only if its manifest.json does. A folder without a manifest is debris and is ignored by
every reader. A symbolic link is never a step.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path

from cairn.checkpoint.manifest import (
    FILE_NAME,
    STEP_NAME,
    CheckpointError,
    Manifest,
    check_files,
    load_manifest,
)
from cairn.checkpoint.tensors.compression import check_tables
from cairn.run.errors import UsageError
from cairn.run.file_system import appears


class StepFolders:
    """The steps in the folder `root`, as readers see them."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()
        self.abandoned = self.root / "abandoned"
        """Folder for the steps that were set aside when the run went back to an earlier one."""
        self.away = self.root / "away"
        """Folder for a step whose tensors are in an object store, from where ranks read them."""

    def folder(self, step: int) -> Path:
        """The folder of a step, whether or not it exists."""
        return self.root / f"step_{step}"

    def steps(self) -> list[int]:
        """The steps that exist, oldest first."""
        return [step for step in self._folders() if self.exists(step)]

    def exists(self, step: int) -> bool:
        """Whether a step exists: if and only if its manifest does."""
        folder = self.folder(step)
        return appears(folder / FILE_NAME) and not folder.is_symlink()

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        return load_manifest(self.folder(step))

    def links(self) -> list[Path]:
        """Symbolic links named like steps; neither links nor targets are read or changed."""
        return sorted(Path(entry) for entry in self._entries() if entry.is_symlink())

    def debris(self) -> list[Path]:
        """Folders of saves that were never committed."""
        return [self.folder(step) for step in self._folders() if not self.exists(step)]

    def _folders(self) -> list[int]:
        return sorted(step_of(entry) for entry in self._entries() if entry.is_dir(follow_symlinks=False))

    def _entries(self) -> "list[os.DirEntry[str]]":
        try:
            with os.scandir(self.root) as entries:
                return [entry for entry in entries if STEP_NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            if self.root.is_symlink():  # perhaps to a disk that is not mounted, with steps on it
                raise UsageError(f"{self.root}: links to {self.root.readlink()}, which is missing") from None
            return []
        except NotADirectoryError:
            if not os.path.lexists(self.root):  # a parent is not a folder
                return []
            raise UsageError(f"{self.root}: is not a folder, which checkpoints need; move it away") from None

    def latest(self) -> int | None:
        """The newest step that exists; None if there is none."""
        numbers = reversed(self._folders())
        return next((step for step in numbers if self.exists(step)), None)

    def newest_good(self, *, content: bool = True) -> tuple[Path | None, list[str]]:
        """The folder of the newest undamaged step, and what is wrong with each newer one.

        Args:
            content: False checks names and sizes only.
        """
        step, passed_over = newest_good(self.steps(), lambda step: verify(self.folder(step), content=content))
        return None if step is None else self.folder(step), passed_over


def newest_good(steps: Collection[int], check: Callable[[int], object]) -> tuple[int | None, list[str]]:
    """The newest of `steps` for which `check` raises no CheckpointError; and the errors of the newer ones."""
    passed_over: list[str] = []
    for step in sorted(steps, reverse=True):
        try:
            check(step)
            return step, passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def step_of(folder: "Path | os.DirEntry[str]") -> int:
    """The step number in a folder's name."""
    return int(folder.name.removeprefix("step_"))


def verify(
    folder: Path,
    *,
    content: bool = True,
    tensors: bool = True,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Manifest:
    """Verify every file of a step against its manifest.

    Args:
        content: False checks names and sizes only.
        tensors: False leaves the content of tensor files to whoever loads them.
        on_bytes: called with the number of bytes checked since the last call, for a progress bar.

    Raises:
        CheckpointError: the folder is not a checkpoint.
        Damaged: a file differs; the message names file and position.
    """
    manifest = load_manifest(folder)
    check_files(folder, manifest, content=content, tensors=tensors, on_bytes=on_bytes)
    check_tables(folder, manifest.contents)
    return manifest
