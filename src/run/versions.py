"""Policy versions in transit: published by the trainer, announced to the orchestrator, loaded by servers."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from cairn.run.attempt import Attempt
from cairn.run.files import entries, read_note, write_json
from cairn.run.messages import Announcement

NOTE = re.compile(r"v([0-9]+)\.json")
OURS = re.compile(r"\.spare|v[0-9]+(\.json)?|\.v[0-9]+\..*")

WEIGHT_SOURCE = "source.json"
"""In a policy version's folder, in place of its tensors: where servers get them."""


class PolicyVersions:
    """The folder `weights/` of a run: Hugging Face folders `v<step>/`, each announced by `v<step>.json`."""

    def __init__(self, path: Path):
        self.path = path
        self.spare = path / ".spare"
        """A version's folder that nobody needs any more, if it is there."""

    def folder(self, step: int) -> Path:
        """The Hugging Face directory of the policy after `step` steps, while it is in transit."""
        return self.path / f"v{step}"

    def announce(self, attempt: Attempt, step: int, *, save: bool, last: bool) -> None:
        """Say that the policy after `step` steps lies in `folder(step)`; see `Announcement`."""
        message = Announcement(attempt.id, step, save, last)
        write_json(self._note(step), message.to_json())

    def announced(self, attempt: Attempt, step: int) -> Announcement | None:
        """The announcement of version `step` by this attempt, if it is there yet."""
        message = read_note(self._note(step), Announcement)
        return message if message and message.attempt == attempt.id else None

    def all_announced(self, attempt: Attempt) -> list[int]:
        """The versions that this attempt has announced and not yet removed, oldest first."""
        return sorted(step for step in self._steps() if self.announced(attempt, step))

    def forget_before(self, step: int) -> None:
        """Remove the policy versions before `step`, which no server will be given any more.

        One of their folders becomes `spare`, for the trainer to write a new version into: memory that is in
        the page cache already is several times as fast to write as new memory.
        """
        for older in self._steps():
            if older < step:
                folder = self.folder(older)
                with contextlib.suppress(OSError):  # there is one already, or nothing to keep
                    os.rename(folder, self.spare)
                shutil.rmtree(folder, ignore_errors=True)
                self._note(older).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the versions of an earlier attempt, which nobody waits for any more."""
        if not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for path in self.path.iterdir():  # of a link, to memory perhaps, only what is ours
            if OURS.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _note(self, step: int) -> Path:
        return self.folder(step).with_suffix(".json")

    def _steps(self) -> Iterator[int]:
        names = (NOTE.fullmatch(path.name) for path in entries(self.path, ".json"))
        return (int(match[1]) for match in names if match)
