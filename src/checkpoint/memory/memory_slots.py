"""What is in the memory of a run's newest steps, and a folder from which ranks load a step that is there.

The memory itself belongs to another process (`owner.py`), and is reached through links in the run directory.
Imports no torch: the trainer's driver looks here.
"""

import base64
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import FileChecksum, merge_checksums, note_of, read_receipt
from cairn.checkpoint.manifest import (
    FILE_NAME,
    CheckpointError,
    Damaged,
    Origin,
    check_content,
    new_manifest,
)
from cairn.checkpoint.memory.owner import began
from cairn.run.files import parse_json, read_json, read_note, write_atomic, write_json
from cairn.run.messages import Attempt

logger = logging.getLogger(__name__)

SLOTS = ("a", "b")
RECORD = "record.json"
FIXED = "fixed"
"""The folder, beside the slots, of small files that all steps have alike."""


@dataclass(frozen=True)
class MemoryOwner:
    """The content of owner.json: which process owns the memory, when it began, and for which files."""

    pid: int
    began: str
    layout: str

    @property
    def lives(self) -> bool:
        """Whether the process is still there."""
        try:
            return began(self.pid) == self.began
        except OSError:
            return False


@dataclass(frozen=True)
class MemoryRecord:
    """What a step's manifest says, and the small files of the step; written by rank 0.

    attempt: the id of the attempt that took the step. saves: the newest step of which it was decided to save
    it as a checkpoint; 0: none. about: the manifest's fields that describe the run. files: small files, by
    name within the step, base64. linked: large files, by name within the step: where they lie.
    """

    attempt: str
    session: str
    step: int
    saves: int
    about: dict[str, Any]
    files: dict[str, str]
    linked: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def parent(self) -> Origin | None:
        """The checkpoint that the run had last saved before the step."""
        origin = self.about["parent"]
        return Origin(**origin) if origin else None

    def to_json(self) -> bytes:
        """The content of record.json."""
        return json.dumps(asdict(self)).encode()


def owner_of(folder: Path) -> MemoryOwner | None:
    """Who owns the memory behind the links in `folder`; None if that process is gone."""
    note = read_note(folder / "owner.json", MemoryOwner)
    return note if note and note.lives else None


def receipt_name(rank: int) -> str:
    """The file in a slot of the receipt for what a rank has copied."""
    return f"rank{rank}.json"


def receipt_id(session: str, step: int) -> str:
    """What such a receipt is for. The session tells the start of all ranks from others, which may have made
    other bytes of the same step.
    """
    return f"{session}:{step}"


def record_in(slot: Path) -> MemoryRecord | None:
    """What rank 0 says of the step in a slot, if it is whole."""
    with contextlib.suppress(OSError, ValueError):
        return parse_json((slot / RECORD).read_bytes(), MemoryRecord)
    return None


def free(folder: Path) -> None:
    """End the process that owns the memory behind the links in `folder`, if it lives, and remove them."""
    if owner := owner_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def start_in_memory(folder: Path, start: Attempt, may_start: Callable[[MemoryRecord], bool]) -> Attempt:
    """The attempt as seen by ranks that go on from the newest whole step in memory, if one is newer.

    Every byte is read and compared with the checksums of the ranks that have copied it. The step gets its
    folder, as a checkpoint has one, whose tensor files are links to the memory.

    Args:
        start: where the newest checkpoint would have them start.
        may_start: whether what other roles know allows it.
    """
    if owner_of(folder) is None:
        return start
    found = [(record, folder / slot) for slot in SLOTS if (record := record_in(folder / slot))]
    for record, slot in sorted(found, key=lambda one: one[0].step, reverse=True):
        if record.attempt != start.id or record.step <= start.start_step or not may_start(record):
            continue
        try:
            step = _as_step(folder, slot, record)
        except (OSError, CheckpointError) as error:
            logger.warning("step %d in memory is passed over: %s", record.step, error)
            continue
        return dataclasses.replace(start, start_step=record.step, resume_from=str(step))
    return start


def record_of(step: Path) -> MemoryRecord | None:
    """What is known of the step in a folder that `start_in_memory` has made; None of any other."""
    return read_json(step.with_suffix(".json"), MemoryRecord)


def _as_step(folder: Path, slot: Path, record: MemoryRecord) -> Path:
    """Make the folder of a step in memory.

    Raises:
        Unsealed: the part of a rank is not whole, or was changed.
    """
    copied: dict[str, FileChecksum] = {}
    for rank in range(record.about["world_size"]):
        receipt = note_of(receipt_id(record.session, record.step), slot / receipt_name(rank))
        if receipt is None:
            raise Unsealed(f"rank {rank} had not copied its part")
        merge_checksums(copied, read_receipt(receipt))
    if any(part.nbytes != part.size for part in copied.values()):
        raise Unsealed("the ranks have not copied all of it")
    step = folder / f"step_{record.step}"
    for old in folder.glob("step_*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    checksums = dict(copied)
    for name in copied:
        _place(step, name).symlink_to(os.readlink(slot / name))
    found = [path for path in (folder / FIXED).rglob("*") if path.is_file()]
    fixed = {str(path.relative_to(folder / FIXED)): str(path) for path in found}
    for name, source in {**fixed, **record.linked}.items():
        place = _place(step, name)
        try:
            os.link(source, place)
        except OSError:  # another file system
            shutil.copyfile(source, place)
        checksums[name] = FileChecksum.read(place)
    for name, text in record.files.items():
        data = base64.b64decode(text)
        _place(step, name).write_bytes(data)
        checksums[name] = FileChecksum.of(data)
    manifest = new_manifest(record.step, checksums, record.about)
    try:
        check_content(step, {name: manifest.files[name] for name in copied})
    except Damaged as error:
        raise Unsealed(f"it is not what the ranks have copied: {error}") from None
    write_json(step.with_suffix(".json"), asdict(dataclasses.replace(record, files={})))
    write_atomic(step / FILE_NAME, manifest.to_json())
    return step


def _place(step: Path, name: str) -> Path:
    """Where a file of a step is; the folder that it is in is made."""
    place = step / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


class Unsealed(CheckpointError):
    """A step in memory is not whole."""
