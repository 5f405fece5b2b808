"""Writes files at any place, several blocks at a time, with O_DIRECT where the file system supports it."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from cairn.checkpoint.tensors.layout import ALIGNMENT, DIRECT_BYTES
from cairn.run.file_system import parts_of_pages

LIBC = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE = 1
WRITERS = 2
"""Concurrent writes."""


@dataclass(frozen=True)
class DirectFile:
    """A file of a known size that is open for writing. Several threads may write to it.

    fd: its descriptor. direct: one with O_DIRECT; None if the file system does not support that.
    """

    fd: int
    direct: int | None

    def allocate(self, offset: int, nbytes: int) -> None:
        """Preallocate a long range (fallocate) if the file system can; that makes writing faster.

        Raises:
            OSError: the disk is full.
        """
        if nbytes >= DIRECT_BYTES:
            where, length = ctypes.c_int64(offset), ctypes.c_int64(nbytes)
            failed = LIBC.fallocate(self.fd, FALLOC_FL_KEEP_SIZE, where, length)
            if failed and ctypes.get_errno() == errno.ENOSPC:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`.

        Long data goes past the page cache if its place in the file and its length are aligned, and the file
        system accepts that; its place in memory must then be aligned, too.

        Raises:
            OSError: it can't be written.
        """
        aligned = offset % ALIGNMENT == 0 and len(data) % ALIGNMENT == 0
        direct = self.direct if aligned and len(data) >= DIRECT_BYTES else None
        while data:
            try:
                written = os.pwrite(self.fd if direct is None else direct, data, offset)
            except OSError as error:
                if direct is None or error.errno != errno.EINVAL:
                    raise
                direct = None  # this file system accepts O_DIRECT in open but not in write
                continue
            data = data[written:]
            offset += written

    def sync(self) -> None:
        """Make all of it durable.

        Raises:
            OSError: the disk reports an error.
        """
        os.fsync(self.fd)


@contextlib.contextmanager
def direct_file(path: Path, size: int) -> Generator[DirectFile]:
    """A file, made if it is missing, of the size `size`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | parts_of_pages(path), 0o644)
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
        yield DirectFile(fd, direct)
    finally:
        os.close(fd)
        if direct is not None:
            os.close(direct)
