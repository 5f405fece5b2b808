"""The process that writes checkpoints, separate from the training process because of the GIL.

It shares an arena of memory with the trainer, which copies its state there while training continues. This
process follows the copy, computes checksums, writes with O_DIRECT where the file system supports it, fsyncs,
and writes the rank's receipt last. It does not import torch.

Commands are JSON lines on standard input: `plan` once, then for each save `save`, followed by `copied` lines
that report how far the copy has come. Each save is answered with a JSON line: {"done": seconds} or
{"error": ...}; of an arena that is a ring, after {"written": position} lines, up to which it may be reused.
"""

import contextlib
import itertools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, chunk_crc, crc64, make_receipt
from cairn.checkpoint.tensors.compression import PackWriter, pack, pack_blocks
from cairn.checkpoint.tensors.direct_io import WRITERS, direct_file
from cairn.checkpoint.tensors.layout import ALIGNMENT, DIRECT_BYTES, Extent, ring_pieces
from cairn.run.faults import fault_point
from cairn.run.files import forget_cached, sync, write_json, written_otherwise
from cairn.run.processes import die_with
from cairn.run.signals import ignore_stop_signals

WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class Packing:
    """What a rank packs: by file number, the bytes of a value in that file."""

    rank: int = 0
    widths: Mapping[int, int] = field(default_factory=dict[int, int])


class ArenaWriter:
    """Writes the planned extents of one rank from its arena.

    Args:
        written: of a ring, is told the arena position up to which all is written.
        packing: which files to pack.
    """

    def __init__(
        self,
        arena: memoryview,
        files: list[tuple[str, int]],
        extents: list[Extent],
        written: Callable[[int], None] | None = None,
        packing: Packing = Packing(),  # noqa: B008 # it is frozen
    ):
        self.packing = packing
        self.arena = arena
        self.written = written
        self.files = files
        self.extents = extents

    def save(
        self,
        folder: Path,
        receipt: Path,
        attempt: str,
        wait_for_copy: Callable[[int, Callable[[], None]], None],
        *,
        read_back: bool = False,
    ) -> None:
        """Write all extents below `folder`, fsync them, then write the receipt to the file of that name.

        Args:
            wait_for_copy: blocks until the arena is filled up to the given position; calls the given function
            first if it has to wait.
            read_back: read everything again from the disk and compare.

        Raises:
            OSError: a write failed, for example because the disk is full.
        """
        checksums = {name: FileChecksum(size) for name, size in self.files}
        names = [self.files[number][0] for number in self.packing.widths]
        contents = {name: checksums.pop(name) for name in names}
        touched: list[Path] = []
        packs: dict[str, PackWriter] = {}
        with contextlib.ExitStack() as closing, ThreadPoolExecutor(WRITERS) as pool:
            for number, (name, size) in enumerate(self.files):
                extents = [extent for extent in self.extents if extent.file == number]
                if not extents:
                    continue
                if number in self.packing.widths:
                    where = name.rpartition("/")[0]
                    if where not in packs:
                        packs[where] = PackWriter(folder, where, self.packing.rank)
                        closing.callback(packs[where].close)
                    width = self.packing.widths[number]
                    self._pack_file(packs[where], name, width, extents, contents[name], wait_for_copy, pool)
                else:
                    self._write_file(folder / name, extents, checksums[name], size, wait_for_copy, pool)
                    touched.append(folder / name)
            packed = {name: checksum for pack in packs.values() for name, checksum in pack.finish().items()}
        touched += [folder / name for name in packed]
        fault_point("save.before_fsync")
        for path in touched:
            sync(path)
        for parent in sorted({path.parent for path in touched}):
            sync(parent)
        if read_back:
            self._check_disk(folder, checksums, packed)
        fault_point("save.before_part")
        write_json(receipt, make_receipt(attempt, checksums | packed, contents), durable=True)

    def _check_disk(
        self, folder: Path, checksums: Mapping[str, FileChecksum], packed: Mapping[str, FileChecksum]
    ) -> None:
        """Read everything again, and compare it with what was written."""
        for number, (name, size) in enumerate(self.files):
            extents = [extent for extent in self.extents if extent.file == number and name in checksums]
            if extents and _read_back(folder / name, extents, size).crcs != checksums[name].crcs:
                raise written_otherwise(folder / name)
        for name, checksum in packed.items():
            if _chunks_on_disk(folder / name, checksum.size) != checksum.chunks():
                raise written_otherwise(folder / name)

    def _write_file(
        self,
        path: Path,
        extents: list[Extent],
        checksum: FileChecksum,
        size: int,
        wait_for_copy: Callable[[int, Callable[[], None]], None],
        pool: ThreadPoolExecutor,
    ) -> None:
        pending: list[tuple[Future[None], int]] = []

        def settle(most: int) -> None:
            """Wait until at most so many writes are pending, and report the others."""
            while len(pending) > most:
                write, end = pending.pop(0)
                write.result()
                if self.written:
                    self.written(end)

        def before_waiting() -> None:
            if self.written:  # the copy may be waiting for that
                settle(0)

        with direct_file(path, size) as file:
            try:
                for extent in extents:
                    file.allocate(extent.offset, extent.nbytes)
                    for offset, nbytes in _blocks(extent.offset, extent.nbytes):
                        start = extent.arena + offset - extent.offset
                        wait_for_copy(start + nbytes, before_waiting)
                        fault_point("save.write")
                        for done, first, count in ring_pieces(start, nbytes, len(self.arena)):
                            data, place = self.arena[first : first + count], offset + done
                            pending.append((pool.submit(file.write, data, place), start + done + count))
                            checksum.add_crc(place, count, crc64(data))
                        settle(2 * WRITERS)
                settle(0)
            finally:
                wait([write for write, _ in pending])  # they must finish before the file is closed

    def _pack_file(
        self,
        packed: PackWriter,
        name: str,
        width: int,
        extents: list[Extent],
        checksum: FileChecksum,
        wait_for_copy: Callable[[int, Callable[[], None]], None],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Append the blocks of a file, in order, while later ones are compressed."""
        pending: list[tuple[Future[tuple[bytes, int, int]], int, int, int]] = []

        def settle(most: int) -> None:
            """Wait until at most so many blocks are being compressed; write and report the others."""
            while len(pending) > most:
                compressed, offset, nbytes, end = pending.pop(0)
                stored, used, crc = compressed.result()
                checksum.add_crc(offset, nbytes, crc)
                packed.add(name, offset, nbytes, stored, used)
                if self.written:
                    self.written(end)

        def before_waiting() -> None:
            if self.written:  # the copy may be waiting for that
                settle(0)

        for extent in extents:
            for offset, nbytes in pack_blocks(extent.offset, extent.nbytes):
                start = extent.arena + offset - extent.offset
                wait_for_copy(start + nbytes, before_waiting)
                fault_point("save.write")
                pending.append(
                    (pool.submit(self._pack, start, nbytes, width), offset, nbytes, start + nbytes)
                )
                settle(2 * WRITERS)
        settle(0)

    def _pack(self, start: int, nbytes: int, width: int) -> tuple[bytes, int, int]:
        """Compress a range of the arena; returns what `pack` does, and the range's CRC."""
        pieces = [
            self.arena[first : first + n] for _, first, n in ring_pieces(start, nbytes, len(self.arena))
        ]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return (*pack(data, width), crc64(data))


def _chunks_on_disk(path: Path, size: int) -> list[int]:
    """The CRCs of a file's chunks as the disk, not the page cache, has them."""
    with open(path, "rb") as file:
        forget_cached(file.fileno())
    return [chunk_crc(path, chunk) for chunk in range(-(-size // CHUNK_BYTES))]


def _blocks(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Cut a range at multiples of WRITE_BYTES and, if it is long, at the page boundaries near its ends."""
    end = offset + nbytes
    cuts = {offset, end, *range(-(-offset // WRITE_BYTES) * WRITE_BYTES, end, WRITE_BYTES)}
    if nbytes >= DIRECT_BYTES:  # partial pages at the ends can't be written with O_DIRECT
        cuts |= {-(-offset // ALIGNMENT) * ALIGNMENT, end // ALIGNMENT * ALIGNMENT}
    places = sorted(cuts)
    return [(a, b - a) for a, b in itertools.pairwise(places)]


def _read_back(path: Path, extents: list[Extent], size: int) -> FileChecksum:
    """The checksum of the bytes on the disk, bypassing the page cache."""
    checksum = FileChecksum(size)
    with open(path, "rb", buffering=0) as file:
        forget_cached(file.fileno())
        for extent in extents:
            for offset, nbytes in _blocks(extent.offset, extent.nbytes):
                checksum.add(offset, os.pread(file.fileno(), nbytes, offset))
    return checksum


class _Commands:
    """Reads commands from standard input line by line."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.copied = 0

    def next(self) -> dict[str, Any] | None:
        """The next command; None once the trainer has exited."""
        line = self.stream.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def wait_for_copy(self, position: int, before: Callable[[], None]) -> None:
        """Block until the trainer has copied its state up to `position`; call `before` if that takes time."""
        if self.copied < position:
            before()
        while self.copied < position:
            command = self.next()
            if command is None:
                sys.exit(0)  # the trainer died: leave the unfinished save as debris
            self.copied = command["copied"]


def main() -> None:
    """Serve one training process until it closes standard input."""
    arena_fd, nbytes, trainer = map(int, sys.argv[1:])
    die_with(trainer)  # after a restart another process may write the same step
    ignore_stop_signals()  # the trainer ends this process
    os.nice(10)
    os.posix_fallocate(arena_fd, 0, nbytes)  # allocate the pages now, not during a save
    arena = memoryview(mmap.mmap(arena_fd, nbytes))
    commands = _Commands(sys.stdin.buffer)
    plan = commands.next()
    if plan is None:
        return
    extents = [Extent(*extent) for extent in plan["extents"]]
    packing = Packing(plan["rank"], {int(number): width for number, width in plan["packed"].items()})
    writer = ArenaWriter(arena, plan["files"], extents, _written if plan["report"] else None, packing)
    while (command := commands.next()) is not None:
        if "save" not in command:
            continue
        started = time.monotonic()
        commands.copied = 0
        answer: dict[str, Any]
        try:
            writer.save(
                Path(command["save"]),
                Path(command["receipt"]),
                command["attempt"],
                commands.wait_for_copy,
                read_back=command["read_back"],
            )
            answer = {"done": time.monotonic() - started}
        except OSError as error:
            answer = {"error": f"{error.filename or command['save']}: {error.strerror}"}
        _answer(answer)


def _written(position: int) -> None:
    _answer({"written": position})


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
