"""What is in the memory of a run's newest steps, and a folder from which ranks load a step that is there.

The memory itself belongs to other processes (`cairn.run.memory_owner`), and is reached through links in the
run directory, or over the network. Imports no torch: the trainer's driver looks here.
"""

import base64
import dataclasses
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import FileChecksum, merge_checksums, read_receipt
from cairn.checkpoint.manifest import (
    FILE_NAME,
    CheckpointError,
    Damaged,
    Origin,
    check_content,
    new_manifest,
)
from cairn.checkpoint.memory.memory_owners import LAUNCHER, NOTE, FoundSlot, living_slots
from cairn.checkpoint.tensors.node_ranges import NodeRange, NodeReader, note_ranges
from cairn.checkpoint.tensors.remote_ranges import beginning, note_away
from cairn.run.files import parse_json, read_json, read_note, write_atomic, write_json
from cairn.run.memory_owner import RECORD
from cairn.run.messages import Attempt

logger = logging.getLogger(__name__)

SLOTS: tuple[str, ...] = ("a", "b")
FIXED = "fixed"
"""The folder, beside the slots, of small files that all steps have alike."""
UNREADABLE = "unreadable.json"
"""The file, beside the slots, of the ids of steps that ranks could not load."""


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
    slot: str = ""

    @property
    def id(self) -> str:
        """What the receipts of its step are for."""
        return receipt_id(self.session, self.step)

    @property
    def is_owed(self) -> bool:
        """Whether the step itself was to be saved."""
        return self.saves >= self.step

    @property
    def parent(self) -> Origin | None:
        """The checkpoint that the run had last saved before the step."""
        origin = self.about["parent"]
        return Origin(**origin) if origin else None

    def to_json(self) -> bytes:
        """The content of record.json."""
        return json.dumps(asdict(self)).encode()


def receipt_name(rank: int) -> str:
    """The file in a slot of the receipt for what a rank has copied."""
    return f"rank{rank}.json"


def receipt_id(session: str, step: int) -> str:
    """What such a receipt is for. The session tells the start of all ranks from others, which may have made
    other bytes of the same step.
    """
    return f"{session}:{step}"


def start_in_memory(folder: Path, start: Attempt, may_start: Callable[[MemoryRecord], bool]) -> Attempt:
    """The attempt as seen by ranks that go on from the newest whole step in memory, if one is newer.

    A step that was to be a checkpoint, and is not saved yet, comes after all others, and after the checkpoint
    of the step before it: these lead there again, to the same checkpoint. If it is gone on from nevertheless,
    the step after it is saved instead.

    The step gets its folder, as a checkpoint has one. In the memory of this machine, every byte is read and
    compared with the checksums of the ranks that have copied it, and the tensor files are links to the
    memory. From the memory of several nodes ranks read their ranges, and compare them as they load them.

    Args:
        start: where the newest checkpoint would have them start.
        may_start: whether what other roles know allows it.
    """
    slots = living_slots(folder, SLOTS)
    unreadable = read_note(folder / UNREADABLE, list[str]) or []
    records = {(record.id, record.slot): record for slot in slots if (record := _record_in(slot))}
    for record in sorted(records.values(), key=lambda one: (not one.is_owed, one.step), reverse=True):
        if record.attempt != start.id or record.step <= start.start_step or not may_start(record):
            continue
        if record.is_owed and record.step == start.start_step + 1:
            continue
        if record.id in unreadable:
            continue
        try:
            step = _as_step(folder, [slot for slot in slots if slot.letter == record.slot], record)
        except (OSError, CheckpointError) as error:
            logger.warning("step %d in memory is passed over: %s", record.step, error)
            continue
        return dataclasses.replace(start, start_step=record.step, resume_from=str(step))
    return start


def record_of(step: Path) -> MemoryRecord | None:
    """What is known of the step in a folder that `start_in_memory` has made; None of any other."""
    return read_json(step.with_suffix(".json"), MemoryRecord)


def forget(step: Path) -> None:
    """Have `start_in_memory` pass over the step whose folder it has made: ranks could not load it."""
    if record := record_of(step):
        path = step.parent / UNREADABLE
        write_json(path, [*(read_note(path, list[str]) or []), record.id])


def _record_in(slot: FoundSlot) -> MemoryRecord | None:
    """What rank 0 says of the step in a slot, if it is whole."""
    try:
        return dataclasses.replace(parse_json(slot.notes.get(RECORD, ""), MemoryRecord), slot=slot.letter)
    except ValueError:
        return None


def _as_step(folder: Path, slots: Sequence[FoundSlot], record: MemoryRecord) -> Path:
    """Make the folder of a step in memory.

    Args:
        slots: where its parts may be; the first one counts that has a part.

    Raises:
        Unsealed: the part of a rank is not whole, or was changed.
    """
    copied: dict[str, FileChecksum] = {}
    places: dict[str, list[NodeRange]] = {}
    for rank in range(record.about["world_size"]):
        slot, receipt = _part(slots, rank, record)
        merge_checksums(copied, read_receipt(receipt))
        for name, spans in receipt.get("spans", {}).items():
            where = (*slot.owner.at, f"{slot.name}/{name}")
            places.setdefault(name, []).extend(NodeRange(first, count, *where) for first, count in spans)
    if any(part.nbytes != part.size for part in copied.values()):
        raise Unsealed("the ranks have not copied all of it")
    step = folder / f"step_{record.step}"
    for old in folder.glob("step_*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    checksums = dict(copied)
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
    if slots[0].owner.address:
        _leave_on_nodes(step, places, {name: checksum.size for name, checksum in copied.items()})
    else:
        for name in copied:
            _place(step, name).symlink_to(os.readlink(folder / record.slot / name))
        try:
            check_content(step, {name: manifest.files[name] for name in copied})
        except Damaged as error:
            raise Unsealed(f"it is not what the ranks have copied: {error}") from None
    write_json(step.with_suffix(".json"), asdict(dataclasses.replace(record, files={})))
    write_atomic(step / FILE_NAME, manifest.to_json())
    return step


def _part(slots: Sequence[FoundSlot], rank: int, record: MemoryRecord) -> tuple[FoundSlot, dict[str, Any]]:
    """Where the part of a rank is, and its receipt.

    Raises:
        Unsealed: there is none.
    """
    for slot in slots:
        try:
            receipt = parse_json(slot.notes.get(receipt_name(rank), ""), dict[str, Any])
        except ValueError:
            continue
        if receipt.get("attempt") == record.id:
            return slot, receipt
    raise Unsealed(f"rank {rank} had not copied its part")


def _leave_on_nodes(step: Path, places: Mapping[str, list[NodeRange]], sizes: Mapping[str, int]) -> None:
    """Write down where the bytes of a step's tensor files are; of each file bring what precedes its values.

    Raises:
        CheckpointError: a node does not answer, or a file is none of tensors.
    """
    path = step.with_name(f"{step.name}.{secrets.token_hex(4)}.json")
    files = {f"{step.name}/{name}": spans for name, spans in places.items()}
    url = note_ranges(path, files, step.parent / LAUNCHER / NOTE)
    reader = NodeReader(url)
    for name, size in sizes.items():
        first = beginning(lambda at, n, name=name: reader.read(f"{step.name}/{name}", at, n), size, name)
        write_atomic(_place(step, name), first)
    note_away(step, url, sizes)


def _place(step: Path, name: str) -> Path:
    """Where a file of a step is; the folder that it is in is made."""
    place = step / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


class Unsealed(CheckpointError):
    """A step in memory is not whole."""
