# torch is typed in part.
# pyright: reportUnknownMemberType=false
"""Files of tensors that no step changes: written once, and in later steps hard links to the same file.

The parent step's file is linked if it has the header that this save would write, and its manifest the size.
Every rank computes the checksums of its values at each save all the same, and the step is committed only if
they are those of the parent's manifest. So a link never stands for other values, and retention need not
count references: the file system keeps the bytes as long as a step has them. Where nothing can be linked (the
first save, a parent that was deleted or damaged, a file system without hard links) the files are written.

Files that each step takes over as they are, such as those of an adapter's base model, are linked likewise
(`carry`). The first step has copies of them, compared with their checksums on the way.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, make_receipt, note_of
from cairn.checkpoint.manifest import CheckpointError, FileEntry, check_content, check_size, load_manifest
from cairn.checkpoint.saving.rank_shares import Tensors, inside
from cairn.checkpoint.tensors.host_staging import Outlet, copies_from
from cairn.checkpoint.tensors.layout import FileLayout
from cairn.checkpoint.tensors.placement import share_of
from cairn.checkpoint.tensors.reader import as_memory
from cairn.checkpoint.tensors.remote_ranges import away_files
from cairn.checkpoint.tensors.rows import in_rows
from cairn.checkpoint.tensors.sharded_files import plan_tensors, write_at
from cairn.run.file_system import parts_of_pages
from cairn.run.files import forget_cached, make_folders, naming, sync, write_json, written_otherwise
from cairn.run.waiting import wait_for

LINKED = ".linked.part.json"
Names = Mapping[str, Collection[str]]
"""Tensors by stem."""


class ConstantFiles:
    """The files of one save that hold constant tensors, and this rank's values in them.

    Args:
        tensors: all that is saved; the caller's thread is the one that trains.
        constant: which of them no step changes.
    """

    def __init__(self, tensors: Tensors, constant: Names, rank: int, max_file_bytes: int):
        self.rank = rank
        self.files: list[FileLayout] = []
        self._values: dict[str, list[tuple[int, torch.Tensor]]] = {}
        devices = {tensors[stem][name].device for stem, names in constant.items() for name in names}
        self._outlet = Outlet(copies_from(devices))
        for stem, names in constant.items():
            where, _, short = stem.rpartition("/")
            planned, _ = plan_tensors(tensors[stem], short, max_file_bytes, apart=names)
            held = in_rows({name: tensor for name, tensor in tensors[stem].items() if name in names})
            for file in planned:
                if file.offsets.keys().isdisjoint(names):
                    continue
                self.files.append(inside(file, where, stem))
                ours = self._values[self.files[-1].name] = []
                for name, start in file.offsets.items():
                    share = share_of(name, held[name], rank).owned()
                    size = share.dtype.itemsize
                    flat = share.local.reshape(-1)
                    ours += [(start + first * size, values) for first, values in share.cut(flat)]
        self._outlet.follow()

    def link(self, parent: Path | None, folder: Path, *, read_back: bool = False) -> dict[str, FileEntry]:
        """Link those files that the step in the folder `parent` has, and create the others, empty.

        Rank 0 calls it, once the folders of the step are there.

        Args:
            read_back: also read what is linked from the disk, and write it anew where it is damaged.

        Returns:
            What the parent's manifest says of each file that was linked.
        """
        linked: dict[str, FileEntry] = {}
        for file in self.files:
            target = folder / file.name
            if parent is not None:
                # Whatever keeps it from being linked, it can be written.
                with contextlib.suppress(OSError, CheckpointError):
                    linked[file.name] = _link(
                        parent, file.name, target, partial(_begins_as, file), read_back=read_back
                    )
                    continue
            target.unlink(missing_ok=True)
            with naming(target), open(target, "xb") as out:  # never into a file that another step shares
                out.truncate(file.size)
        for where in {(folder / file.name).parent for file in self.files}:
            sync(where)
        return linked

    def save(
        self,
        folder: Path,
        linked: Collection[str],
        receipt: Path,
        attempt: str,
        *,
        read_back: bool = False,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        """Write this rank's values into the files that are not linked, and a receipt for all of them.

        Args:
            read_back: read what was written again from the disk and compare.
            on_piece: called before each piece; an error that it raises ends the saving.

        Raises:
            OSError: a write failed.
        """
        checksums = {file.name: FileChecksum(file.size) for file in self.files}
        with torch.no_grad(), self._outlet.running(), contextlib.closing(self._outlet):
            for file in self.files:
                path, checksum = folder / file.name, checksums[file.name]
                with naming(path), contextlib.ExitStack() as closing:
                    fd = None
                    if file.name not in linked:
                        fd = os.open(path, os.O_WRONLY | parts_of_pages(path))
                        closing.callback(os.close, fd)
                    for offset, data in self._pieces(file):
                        on_piece()
                        checksum.add(offset, data)
                        if fd is not None:
                            write_at(fd, data, offset)
                    if fd is not None:
                        os.fsync(fd)
                if read_back and file.name not in linked:
                    self._check_disk(path, file, checksum)
        write_json(receipt, make_receipt(attempt, checksums), durable=True)

    def _pieces(self, file: FileLayout) -> Iterator[tuple[int, memoryview]]:
        """What this rank has of a file: offset and bytes of each piece; rank 0 also has the header."""
        if self.rank == 0:
            yield 0, memoryview(file.header)
        for offset, values in self._values[file.name]:
            each = self._outlet.piece_bytes // values.element_size()
            for first in range(0, len(values), each):
                data = as_memory(self._outlet.bring(values[first : first + each]))
                yield offset, data
                offset += len(data)

    def _check_disk(self, path: Path, file: FileLayout, written: FileChecksum) -> None:
        """Read this rank's ranges of a file, and compare them with what was written."""
        found = FileChecksum(file.size)
        with open(path, "rb", buffering=0) as back:
            forget_cached(back.fileno())
            for offset, data in self._pieces(file):
                found.add(offset, os.pread(back.fileno(), len(data), offset))
        if found.crcs != written.crcs:
            raise written_otherwise(path)


def announce_links(folder: Path, attempt: str, linked: Collection[str]) -> None:
    """Tell all ranks which files of the step in `folder` are links, and need not be written."""
    write_json(folder / LINKED, {"attempt": attempt, "linked": sorted(linked)})


def wait_for_links(
    folder: Path, attempt: str, *, timeout: float, on_poll: Callable[[], None] = lambda: None
) -> list[str]:
    """Wait for `announce_links` of rank 0; returns the files.

    Raises:
        DeadlinePassed: it did not come within `timeout` seconds.
    """
    note = wait_for(
        lambda: on_poll() or note_of(attempt, folder / LINKED),
        seconds=timeout,
        whom=f"rank 0 to link the files of {folder} that have not changed",
        setting="--ckpt.part-timeout",
    )
    return note["linked"]


@dataclass(frozen=True)
class Carried:
    """A file: where it lies, and what it must hold. A source may be in an object store (`away`)."""

    source: Path
    entry: FileEntry

    @classmethod
    def of(cls, source: Path) -> "Carried":
        """The file as it is now, which is read."""
        return cls(source, FileEntry.read(source))

    def is_there(self, entry: FileEntry, _path: Path) -> bool:
        """Whether a step's file with this entry holds the same."""
        return entry == self.entry


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
                _link(parent, name, target, file.is_there, read_back=read_back)
                linked = True
        if not linked:
            target.unlink(missing_ok=True)
            _copy(file, target, on_piece)
            if read_back:
                _check_disk(folder, name, file.entry)
        crcs = {number: int(crc, 16) for number, crc in enumerate(file.entry.crc64nvme)}
        checksums[name] = FileChecksum(file.entry.size, crcs, file.entry.size)
    for where in {(folder / name).parent for name in files}:
        sync(where)
    write_json(receipt, make_receipt(attempt, checksums), durable=True)


def _link(
    parent: Path, name: str, target: Path, is_same: Callable[[FileEntry, Path], bool], *, read_back: bool
) -> FileEntry:
    """Make `target` a link to the file `name` of the step in the folder `parent`; returns its entry there.

    Args:
        is_same: whether the file with this entry, at this path, has what is to be saved.
    """
    source, entry = parent / name, load_manifest(parent).files.get(name)
    if parent.is_symlink() or entry is None:
        raise CheckpointError(f"{parent}: has no {name}")
    check_size(source, entry)
    if not is_same(entry, source):
        raise CheckpointError(f"{source}: holds something else")
    if read_back:
        _check_disk(parent, name, entry)
    os.link(source, target, follow_symlinks=False)
    return entry


def _check_disk(folder: Path, name: str, entry: FileEntry) -> None:
    """Compare a file's bytes on the disk, past the page cache, with its entry.

    Raises:
        CheckpointError: they differ.
    """
    with open(folder / name, "rb") as file:
        forget_cached(file.fileno())
    check_content(folder, {name: entry})


def _begins_as(file: FileLayout, entry: FileEntry, path: Path) -> bool:
    """Whether a file has the header that this save would write: the same tensors at the same places."""
    with open(path, "rb") as existing:
        return entry.size == file.size and existing.read(len(file.header)) == file.header


def _read(source: Path, place: int, count: int) -> bytes:
    with naming(source), open(source, "rb") as file:
        file.seek(place)
        return file.read(count)


def _copy(file: Carried, target: Path, on_piece: Callable[[], None]) -> None:
    checksum = FileChecksum(file.entry.size)
    away = away_files(file.source.parent).get(file.source.name)
    with naming(target), open(target, "xb") as out:
        for place in range(0, file.entry.size, CHUNK_BYTES):
            on_piece()
            count = min(CHUNK_BYTES, file.entry.size - place)
            data = away.read(place, count) if away else _read(file.source, place, count)
            checksum.add(place, data)
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    whole = checksum.nbytes == checksum.size and FileEntry.of(checksum.size, checksum.chunks()) == file.entry
    if not whole:
        raise CheckpointError(f"{file.source}: is not what it was when the run read it, so it can't be saved")
