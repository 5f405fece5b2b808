# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Writes tensors to safetensors files and reads them back, on all ranks in parallel, without a gather.

Each rank writes the ranges that it owns (`checkpoint.shares`) straight into the final files, and reads only
the ranges that it holds, on any number of ranks.
"""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cairn.checkpoint.checksums import FileChecksum, merge_checksums
from cairn.checkpoint.manifest import (
    CheckpointError,
    Damaged,
    FileEntry,
    Manifest,
    check_content,
    check_crc,
    check_size,
    holds_blocks,
    holds_tensors,
    load_manifest,
)
from cairn.checkpoint.tensors.host_staging import Outlet, copies_from
from cairn.checkpoint.tensors.layout import (
    MAX_FILE_BYTES,
    FileLayout,
    StoredTensor,
    TensorSpec,
    find_tensors,
    plan,
)
from cairn.checkpoint.tensors.placement import Share, Stored, share_of
from cairn.checkpoint.tensors.reader import DTYPE_NAMES, DTYPES, ReadRange, as_memory, read_pieces
from cairn.checkpoint.tensors.remote_ranges import AwayFile, away_in_step, check_away
from cairn.checkpoint.tensors.rows import RowTargets, in_rows
from cairn.checkpoint.tensors.source import TensorSource


def plan_tensors(
    tensors: Mapping[str, Stored],
    stem: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    apart: Collection[str] = (),
) -> tuple[list[FileLayout], bytes | None]:
    """The files that hold these tensors in full, and their index; the same on every rank.

    `dtypes` has the data types of those tensors that are not written as they are; those in `apart` come
    first, in files of their own.
    """
    specs = [
        TensorSpec(name, DTYPE_NAMES[dtypes.get(name, t.dtype)], tuple(t.shape))
        for name, t in tensors.items()
    ]
    return plan(specs, stem, max_file_bytes=max_file_bytes, apart=apart)


class OutgoingTensors:
    """Whole tensors, and this rank's shards of DTensors, on their way into `<stem>.safetensors` or several
    such files. The tensors must not change until they are written.

    Every rank makes one with the same names in the same order, on the thread that trains: some values may be
    exchanged. Rank 0 calls `create`, and then each rank `write`, on any thread. The files do not depend on
    the number of ranks. Nothing is fsynced: this is for weights in transit, not for checkpoints.

    Args:
        outlet: through which values leave their device.
        dtypes: what tensors are written as, by name; others are written as they are.
    """

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        stem: str,
        outlet: Outlet,
        *,
        rank: int = 0,
        max_file_bytes: int = MAX_FILE_BYTES,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ):
        tensors = in_rows(tensors)
        self._stem = stem
        self._files, self._index = plan_tensors(tensors, stem, max_file_bytes, dtypes)
        self._outlet = outlet
        self._shares: dict[str, list[tuple[int, Share, torch.dtype]]] = {}
        for file in self._files:
            ours = self._shares[file.name] = []
            for name, start in file.offsets.items():
                share = share_of(name, tensors[name], rank).owned()
                share = replace(share, local=share.local.contiguous())
                if share.ranges:
                    ours.append((start, share, dtypes.get(name, share.dtype)))
        self._outlet.follow()  # also the copies that have made strided values contiguous

    def create(self, folder: Path) -> None:
        """Make the files, with all but the values in them.

        Files that are there are written over, which is faster than making new ones.
        """
        for file in self._files:
            fd = os.open(folder / file.name, os.O_WRONLY | os.O_CREAT, 0o644)
            with open(fd, "wb") as out:
                out.write(file.header)
                out.truncate(file.size)
        if self._index is not None:
            (folder / f"{self._stem}.safetensors.index.json").write_bytes(self._index)

    def write(
        self,
        folder: Path,
        saw: Callable[[str, torch.Tensor, int], object] = lambda name, values, first_byte: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Write this rank's values into the files, piece by piece, through a small piece of host memory.

        Args:
            saw: called with each piece as it is written, while it is in the processor's cache: the tensor's
                name, values on their own device, and the byte of the tensor with which they begin.
            check: called before each piece; what it raises ends the writing.
        """
        outlet = self._outlet
        with torch.no_grad(), outlet.running():
            for file, ours in self._shares.items():
                fd = os.open(folder / file, os.O_WRONLY)
                try:
                    for start, share, dtype in ours:
                        for first, piece in pieces_of(share, dtype, outlet.piece_bytes):
                            check()
                            saw(share.name, piece, first * dtype.itemsize)
                            write_at(fd, as_memory(outlet.bring(piece)), start + first * dtype.itemsize)
                finally:
                    os.close(fd)

    @property
    def shares(self) -> dict[str, tuple[Share, torch.dtype]]:
        """This rank's share of each tensor of which it has any, and what it is written as."""
        return {share.name: (share, dtype) for ours in self._shares.values() for _, share, dtype in ours}


def pieces_of(share: Share, dtype: torch.dtype, piece_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The values of a share as `dtype`, on their own device, in pieces of at most `piece_bytes`; with each
    the number of its first value in the whole tensor.
    """
    for first, values in share.cut(share.flat()):
        for part in values.split(piece_bytes // dtype.itemsize):
            yield first, part.to(dtype)
            first += len(part)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at an offset of a file."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Stored],
    stem: str,
    *,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors to `<stem>.safetensors` or several such files; all ranks call it.

    `barrier` waits for all ranks. See `OutgoingTensors`.
    """
    outlet = Outlet(copies_from(tensor.device for tensor in tensors.values()))
    outgoing = OutgoingTensors(tensors, stem, outlet, rank=rank, max_file_bytes=max_file_bytes)
    with contextlib.closing(outlet):
        if rank == 0:
            outgoing.create(folder)
        barrier()
        outgoing.write(folder)
        barrier()


def read_tensors(
    folder: Path, targets: Mapping[str, Stored], stem: str, *, rank: int = 0
) -> dict[Path, FileChecksum]:
    """Fill `targets` in place, converting the data type: whole tensors, or this rank's shards of DTensors.

    If `targets` are all tensors of the files, the ranks together count every byte once, so the merged
    checksums verify the files.

    Returns this rank's checksum contributions for each file.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        Damaged: a file is damaged.
    """
    rows = RowTargets(targets)
    seen = _read_all([_find(folder, rows.tensors, stem)], rank)
    rows.finish()
    return seen


def read_tensor(stored: TensorSource) -> torch.Tensor:
    """One whole tensor, in the data type of the file."""
    tensor = torch.empty(stored.spec.shape, dtype=dtype_of(stored))
    stored.fill(0, tensor.view(-1))
    return tensor


VALUES = 2 << 20
"""Values of a tensor that `pieces` reads at a time."""


def pieces(*sources: TensorSource) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """The values of tensors of one shape, in pieces: the first value's number, and a piece of each.

    Raises:
        CheckpointError: a data type can't be read.
        Damaged: a file ends too early or is invalid.
    """
    count = math.prod(sources[0].spec.shape)
    for first in range(0, count, VALUES):
        found: list[torch.Tensor] = []
        for source in sources:
            found.append(torch.empty(min(VALUES, count - first), dtype=dtype_of(source)))
            source.fill(first, found[-1])
        yield first, found


@dataclass(frozen=True)
class _Found:
    """Tensors to fill, and the locations of all tensors in their files."""

    targets: Mapping[str, Stored]
    stored: dict[str, StoredTensor]


def _find(folder: Path, targets: Mapping[str, Stored], stem: str) -> _Found:
    stored = find_tensors(folder, stem)
    missing = sorted(targets.keys() - stored.keys())
    if missing:
        raise CheckpointError(f"{folder} holds no tensor {missing[0]!r} ({len(missing)} missing in all)")
    for name, target in targets.items():
        if stored[name].spec.shape != tuple(target.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {list(stored[name].spec.shape)}, expected {list(target.shape)}"
            )
    return _Found(targets, stored)


def _read_all(found: list[_Found], rank: int) -> dict[Path, FileChecksum]:
    """Fill all targets; every rank reads its part, and rank 0 also reads the headers for the checksums."""
    pieces: list[ReadRange] = []
    scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
    for files in found:
        for name, target in files.targets.items():
            stored = files.stored[name]
            share = share_of(name, target, rank)
            local = share.local
            flat = local.view(-1) if local.is_contiguous() else torch.empty(local.numel(), dtype=local.dtype)
            if not local.is_contiguous():
                scattered.append((local, flat))
            dtype = dtype_of(stored)
            pieces += [
                ReadRange(
                    stored.path,
                    stored.offset + first * dtype.itemsize,
                    dtype,
                    values,
                    own,
                    stored.packed,
                    stored.away,
                )
                for first, values, own in share.cut_by_owner(flat)
            ]
        firsts: dict[Path, StoredTensor] = {}
        for tensor in files.stored.values():
            firsts[tensor.path] = min(tensor, firsts.get(tensor.path, tensor), key=lambda t: t.offset)
        for path, first in firsts.items():
            header = torch.empty(first.offset if rank == 0 else 0, dtype=torch.uint8)
            pieces.append(ReadRange(path, 0, torch.uint8, header, packed=first.packed, away=first.away))
    seen = read_pieces(pieces)
    for local, flat in scattered:
        local.copy_(flat.view(local.shape))
    sizes = {p.path: held.size if (held := p.packed or p.away) else p.path.stat().st_size for p in pieces}
    return {path: seen.get(path) or FileChecksum(size) for path, size in sizes.items()}


def load_step(
    folder: Path,
    tensors: Mapping[str, Mapping[str, Stored]],
    *,
    rank: int = 0,
    gather: Callable[[Any], list[Any]] = lambda mine: [mine],
) -> Manifest:
    """Fill `tensors` from a checkpoint; they are given by file stem, such as `model/model`, and name.

    All ranks call it. Each reads only its own ranges; together they read every byte of the step's tensor
    files once, and verify it. An error that one rank finds is raised on all.

    Args:
        gather: returns, on every rank, the list of what all ranks passed to it.

    Raises:
        CheckpointError: the folder is not a checkpoint, or holds other tensors.
        Damaged: a tensor file is damaged; `tensors` then hold what was read.
    """
    manifest = load_manifest(folder)
    rows = {stem: RowTargets(targets) for stem, targets in tensors.items()}
    seen: dict[str, FileChecksum] = {}
    problem: CheckpointError | None = None
    try:
        seen = _load_files(folder, manifest, {stem: own.tensors for stem, own in rows.items()}, rank)
    except CheckpointError as error:
        problem = error
    merged: dict[str, FileChecksum] = {}
    problems: list[CheckpointError] = []
    for others, theirs in gather((seen, problem)):
        problems += [theirs] if theirs else []
        merge_checksums(merged, others)
    try:
        if problems:
            raise next((found for found in problems if isinstance(found, Damaged)), problems[0])
        _check_sums(folder, manifest, merged)
    except Damaged:
        raise
    except CheckpointError:  # a damaged header may name wrong tensors
        _check_tensor_files(folder, {n: e for n, e in manifest.files.items() if holds_tensors(n)})
        raise
    for own in rows.values():
        own.finish()
    return manifest


def _load_files(
    folder: Path, manifest: Manifest, tensors: Mapping[str, Mapping[str, Stored]], rank: int
) -> dict[str, FileChecksum]:
    """Fill this rank's share of `tensors`; returns its contributions to the files' checksums, by name."""
    try:
        away = away_in_step(folder)
        for name, entry in manifest.files.items():
            if holds_tensors(name):
                _check_size(folder / name, entry, away.get(name))
        found = [
            _find(folder / stem.rpartition("/")[0], targets, stem.rpartition("/")[2])
            for stem, targets in tensors.items()
        ]
        checksums = _read_all(found, rank)
    except OSError as error:
        raise Damaged(f"{error.filename or folder}: {error.strerror}") from None
    seen = {path.relative_to(folder).as_posix(): checksum for path, checksum in checksums.items()}
    if rank == 0:  # verify files that no target needs, too
        unpacked = bool(manifest.contents) and manifest.contents.keys() <= seen.keys()
        left = {
            name: entry
            for name, entry in manifest.files.items()
            if holds_tensors(name) and name not in seen and not (unpacked and holds_blocks(name))
        }
        _check_tensor_files(folder, left)
    return seen


def _check_size(path: Path, entry: FileEntry, away: AwayFile | None) -> None:
    """See `check_size`; an object's size was compared when its beginning was brought here."""
    if away is None:
        check_size(path, entry)
    elif away.size != entry.size:
        raise Damaged(f"{away.url}: has {away.size} bytes, but should have {entry.size}")


def _check_tensor_files(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Read these files of a step, wherever they are, and compare them with their checksums.

    Raises:
        Damaged: a file can't be read or was changed.
    """
    away = {name: file for name, file in away_in_step(folder).items() if name in files}
    check_content(folder, {name: entry for name, entry in files.items() if name not in away})
    check_away(away, files)


def _check_sums(folder: Path, manifest: Manifest, merged: Mapping[str, FileChecksum]) -> None:
    """Compare the checksums of what all ranks read with the manifest."""
    for name, checksum in merged.items():
        entry = manifest.files.get(name) or manifest.contents.get(name)
        if entry is None:
            raise Damaged(f"{folder / name}: does not belong to the checkpoint")
        if checksum.size != entry.size:  # of a packed file: others have the size that was checked
            raise Damaged(f"{folder / name}: has {checksum.size} bytes, but should have {entry.size}")
        if checksum.nbytes != checksum.size:
            raise CheckpointError(f"{folder / name}: holds tensors that this run does not have")
        for chunk, crc in enumerate(checksum.chunks()):
            check_crc(folder / name, entry, chunk, crc)


def dtype_of(stored: TensorSource) -> torch.dtype:
    """The data type of a tensor in a file.

    Raises:
        CheckpointError: it is none that torch has.
    """
    if stored.spec.dtype not in DTYPES:
        raise CheckpointError(f"{stored.spec.name} has data type {stored.spec.dtype}, which can't be read")
    return DTYPES[stored.spec.dtype]
