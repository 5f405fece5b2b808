"""Policy versions in transit: published by the trainer, announced to the orchestrator, loaded by servers.

Where trainer and servers share a GPU, also whose turn it is.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from cairn.run.files import entries, read_note, write_json
from cairn.run.messages import Announcement, Attempt, Beginning, HandOver

NOTE = re.compile(r"v([0-9]+)\.json")
FOLDER = re.compile(r"v([0-9]+)")
OURS = re.compile(r"\.spare|v[0-9]+(\.json)?|\.v[0-9]+\..*|(hand_over|beginning)\.json")

WEIGHT_SOURCE = "source.json"
"""In a policy version's folder, in place of its tensors: where servers get them."""


class PolicyVersions:
    """The folder `weights/` of a run: Hugging Face folders `v<step>/`, each announced by `v<step>.json`."""

    def __init__(self, path: Path):
        self.path = path
        self._hand_over = path / "hand_over.json"
        self._beginning = path / "beginning.json"
        self.spare = path / ".spare"
        """A version's folder that nobody needs any more, if it is there."""

    def folder(self, step: int) -> Path:
        """The Hugging Face directory of the policy after `step` steps, while it is in transit."""
        return self.path / f"v{step}"

    def begin(self, attempt: Attempt, *, published: bool) -> None:
        """Say that the trainer holds the policy that the attempt starts from; see `Beginning`."""
        write_json(self._beginning, Beginning(attempt.id, published).to_json())

    def beginning(self, attempt: Attempt) -> Beginning | None:
        """What the trainer of this attempt has said of the policy that it starts from, if it has."""
        message = read_note(self._beginning, Beginning)
        return message if message and message.attempt == attempt.id else None

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
        for path in entries(self.path, ""):  # the policy that the attempt started from has no note
            number = FOLDER.fullmatch(path.name)
            if number and int(number[1]) < step and any(path.glob("*.safetensors")):
                shutil.rmtree(path, ignore_errors=True)

    # Whose turn it is on a GPU that servers share with the trainer. The orchestrator writes the note when all
    # servers sleep, and removes it before it wakes them. As a process may die before it removes the note, the
    # announcement of the policy that the trainer was to make ends the trainer's turn as well.

    def hand_over(self, attempt: Attempt, until: int | None) -> None:
        """Say that the servers sleep until the policy of step `until` is announced; see `HandOver`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self._hand_over, HandOver(attempt.id, until).to_json())

    def take_back(self) -> None:
        """End the trainer's turn: the servers are about to be woken."""
        self._hand_over.unlink(missing_ok=True)

    def handed_over(self, attempt: Attempt) -> HandOver | None:
        """The newest hand-over of this attempt, if it was not taken back; the turn may have ended."""
        message = read_note(self._hand_over, HandOver)
        return message if message and message.attempt == attempt.id else None

    def trainers_turn(self, attempt: Attempt) -> HandOver | None:
        """The hand-over that holds now: no server is awake, or is started."""
        message = self.handed_over(attempt)
        if message is None or message.until is None:
            return message
        return message if message.until > max(self.all_announced(attempt), default=-1) else None

    def may_train(self, attempt: Attempt, step: int) -> bool:
        """Whether it is the trainer's turn, to take step `step` among others."""
        turn = self.trainers_turn(attempt)
        return turn is not None and (turn.until is None or step <= turn.until)

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
