"""The process that writes checkpoints, separate from the training process because of the GIL.

It shares an arena of memory with the trainer, which copies its state there while training continues. This
process follows the copy, computes checksums, writes with O_DIRECT where the file system supports it, fsyncs,
and writes the rank's receipt last. It does not import torch.

Commands are JSON lines on standard input: `plan` once, then for each save `save`, followed by `copied` lines
that report how far the copy has come. Each save is answered with a JSON line: {"done": seconds} or
{"error": ...}; of an arena that is a ring, after {"written": position} lines, up to which it may be reused.
"""

import contextlib
import ctypes
import errno
import itertools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from cairn.checkpoint.checksums import FileChecksum, crc64
from cairn.checkpoint.layout import ALIGNMENT, DIRECT_BYTES, Extent, ring_pieces
from cairn.checkpoint.receipts import make_receipt
from cairn.run.faults import fault_point
from cairn.run.file_system import file_system_of
from cairn.run.files import forget_cached, sync, write_json, written_otherwise
from cairn.run.processes import die_with
from cairn.run.signals import ignore_stop_signals

LIBC = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE = 1
WRITE_BYTES = 8 << 20
WRITERS = 2  # concurrent writes


class ArenaWriter:
    """Writes the planned extents of one rank from its arena.

    Args:
        written: of a ring, is told the arena position up to which all is written.
    """

    def __init__(
        self,
        arena: memoryview,
        files: list[tuple[str, int]],
        extents: list[Extent],
        written: Callable[[int], None] | None = None,
    ):
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
        touched: list[Path] = []
        with ThreadPoolExecutor(WRITERS) as pool:
            for number, (name, size) in enumerate(self.files):
                extents = [extent for extent in self.extents if extent.file == number]
                if extents:
                    self._write_file(folder / name, extents, checksums[name], size, wait_for_copy, pool)
                    touched.append(folder / name)
        fault_point("save.before_fsync")
        for path in touched:
            sync(path)
        for parent in sorted({path.parent for path in touched}):
            sync(parent)
        if read_back:
            for number, (name, size) in enumerate(self.files):
                extents = [extent for extent in self.extents if extent.file == number]
                if extents and _read_back(folder / name, extents, size).crcs != checksums[name].crcs:
                    raise written_otherwise(folder / name)
        fault_point("save.before_part")
        write_json(receipt, make_receipt(attempt, checksums), durable=True)

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

        with _open(path, size) as (fd, direct):
            try:
                for extent in extents:
                    _allocate(fd, extent)
                    for offset, nbytes in _blocks(extent.offset, extent.nbytes):
                        start = extent.arena + offset - extent.offset
                        wait_for_copy(start + nbytes, before_waiting)
                        fault_point("save.write")
                        for done, first, count in ring_pieces(start, nbytes, len(self.arena)):
                            data, place = self.arena[first : first + count], offset + done
                            aligned = place % ALIGNMENT == 0 and count % ALIGNMENT == 0
                            to = direct if aligned and count >= DIRECT_BYTES else None
                            write = pool.submit(_write_all, fd, to, data, place)
                            pending.append((write, start + done + count))
                            checksum.add_crc(place, count, crc64(data))
                        settle(2 * WRITERS)
                settle(0)
            finally:
                wait([write for write, _ in pending])  # they must finish before the file is closed


def _blocks(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Cut a range at multiples of WRITE_BYTES and, if it is long, at the page boundaries near its ends."""
    end = offset + nbytes
    cuts = {offset, end, *range(-(-offset // WRITE_BYTES) * WRITE_BYTES, end, WRITE_BYTES)}
    if nbytes >= DIRECT_BYTES:  # partial pages at the ends can't be written with O_DIRECT
        cuts |= {-(-offset // ALIGNMENT) * ALIGNMENT, end // ALIGNMENT * ALIGNMENT}
    places = sorted(cuts)
    return [(a, b - a) for a, b in itertools.pairwise(places)]


@contextlib.contextmanager
def _open(path: Path, size: int):
    """Descriptors for buffered and, if O_DIRECT works, direct writes; sets the file's final size.

    Ranks on several machines may write parts of one page. With O_DSYNC an NFS client sends the bytes that
    were written, and never the rest of the page as it remembers it.
    """
    shared = os.O_DSYNC if file_system_of(path).is_network else 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | shared, 0o644)
    direct = None
    try:
        os.ftruncate(fd, size)
        try:
            direct = (
                os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0)) if hasattr(os, "O_DIRECT") else None
            )
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        yield fd, direct
    finally:
        os.close(fd)
        if direct is not None:
            os.close(direct)


def _allocate(fd: int, extent: Extent) -> None:
    """Preallocate a long extent (fallocate) if the file system can; that makes writing faster."""
    if extent.nbytes >= DIRECT_BYTES:
        offset, nbytes = ctypes.c_int64(extent.offset), ctypes.c_int64(extent.nbytes)
        if LIBC.fallocate(fd, FALLOC_FL_KEEP_SIZE, offset, nbytes) and ctypes.get_errno() == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_all(fd: int, direct: int | None, data: memoryview, offset: int) -> None:
    """Write `data`, with the O_DIRECT descriptor `direct` if there is one and the file system accepts it."""
    while data:
        try:
            written = os.pwrite(fd if direct is None else direct, data, offset)
        except OSError as error:
            if direct is None or error.errno != errno.EINVAL:
                raise
            direct = None  # this file system accepts O_DIRECT in open but not in write
            continue
        data = data[written:]
        offset += written


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
    writer = ArenaWriter(arena, plan["files"], extents, _written if plan["report"] else None)
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
