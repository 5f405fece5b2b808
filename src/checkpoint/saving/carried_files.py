"""Files that each step of a run takes over as they are, such as those of an adapter's base model.

The first step has copies of them, compared with their checksums on the way, and each later one hard links to
those of the step before. So they take space and time once, and every step is whole on its own.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum
from cairn.checkpoint.manifest import CheckpointError, FileEntry, check_content, check_size, load_manifest
from cairn.checkpoint.receipts import make_receipt
from cairn.checkpoint.tensors.remote_ranges import away_files
from cairn.run.files import forget_cached, make_folders, naming, sync, write_json

PIECE = CHUNK_BYTES


@dataclass(frozen=True)
class Carried:
    """A file: where it lies, and what it must hold. A source may be in an object store (`away`)."""

    source: Path
    entry: FileEntry

    @classmethod
    def of(cls, source: Path) -> "Carried":
        """The file as it is now, which is read."""
        return cls(source, FileEntry.read(source))


def carry(
    files: Mapping[str, Carried],
    parent: Path | None,
    folder: Path,
    receipt: Path,
    attempt: str,
    *,
    read_back: bool = False,
    on_piece: Callable[[], None] = lambda: None,
) -> None:
    """Put `files`, by name within the step, into the step in `folder`, and write the receipt for them.

    Args:
        parent: the folder of the step before.
        read_back: read what is linked or copied from the disk and compare.
        on_piece: called before each piece that is copied; an error that it raises ends the saving.

    Raises:
        CheckpointError: a source holds something else by now.
        OSError: a file can't be read or written.
    """
    checksums: dict[str, FileChecksum] = {}
    for name, file in files.items():
        target = folder / name
        make_folders(target.parent)
        linked = False
        if parent is not None:
            # Whatever keeps it from being linked, it can be copied.
            with contextlib.suppress(OSError, CheckpointError):
                _link(parent, name, file.entry, target, read_back=read_back)
                linked = True
        if not linked:
            target.unlink(missing_ok=True)
            _copy(file, target, on_piece)
            if read_back:
                with open(target, "rb") as back:
                    forget_cached(back.fileno())
                check_content(folder, {name: file.entry})
        crcs = {number: int(crc, 16) for number, crc in enumerate(file.entry.crc64nvme)}
        checksums[name] = FileChecksum(file.entry.size, crcs, file.entry.size)
    for where in {(folder / name).parent for name in files}:
        sync(where)
    write_json(receipt, make_receipt(attempt, checksums), durable=True)


def _link(parent: Path, name: str, entry: FileEntry, target: Path, *, read_back: bool) -> None:
    source = parent / name
    if parent.is_symlink() or load_manifest(parent).files.get(name) != entry:
        raise CheckpointError(f"{parent}: has no such {name}")
    check_size(source, entry)
    if read_back:
        with open(source, "rb") as existing:
            forget_cached(existing.fileno())
        check_content(parent, {name: entry})
    os.link(source, target, follow_symlinks=False)


def _read(source: Path, place: int, count: int) -> bytes:
    with naming(source), open(source, "rb") as file:
        file.seek(place)
        return file.read(count)


def _copy(file: Carried, target: Path, on_piece: Callable[[], None]) -> None:
    checksum = FileChecksum(file.entry.size)
    away = away_files(file.source.parent).get(file.source.name)
    with naming(target), open(target, "xb") as out:
        for place in range(0, file.entry.size, PIECE):
            on_piece()
            count = min(PIECE, file.entry.size - place)
            data = away.read(place, count) if away else _read(file.source, place, count)
            checksum.add(place, data)
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    whole = checksum.nbytes == checksum.size and FileEntry.of(checksum.size, checksum.chunks()) == file.entry
    if not whole:
        raise CheckpointError(f"{file.source}: is not what it was when the run read it, so it can't be saved")
