"""Ranges of files, read block after block into buffers that the caller has.

Bytes in the page cache are copied from there straight into the buffers. Other bytes are read with O_DIRECT, 2
MiB at a time, into memory that stays in the CPU's cache: this takes far less CPU time than filling the page
cache, and a checkpoint is loaded only once.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cairn.checkpoint.manifest import Damaged

BLOCK_BYTES = 512 << 10
"""Bytes per checksum call: few enough to be still in the CPU's cache after they were copied."""
DIRECT_BYTES = 2 << 20
"""Bytes per read with O_DIRECT."""
DIRECT_FROM = 256 << 10
"""Shorter ranges are read through the page cache."""
ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Alignment of reads with O_DIRECT, in bytes."""
MAX_BUFFERS = 512
"""Maximum buffers of one readv; systems allow at least 1024."""
Block = list[memoryview]
"""Buffers to fill with consecutive bytes of a file."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


_libc = ctypes.CDLL(None, use_errno=True)


class File:
    """An open file that several threads read; a context manager."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size
        self.direct_fd: int | None = None
        """Descriptor with O_DIRECT; None if the file system doesn't support that."""
        with contextlib.suppress(OSError):
            self.direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._address = 0
        if self.size >= DIRECT_FROM:
            self._mapped = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)  # takes no memory, is not read
            self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data

    def __enter__(self) -> "File":
        return self

    def is_cached(self, start: int, end: int) -> bool:
        """Whether a range that begins at a page is in the page cache; True if that can't be found out."""
        if not self._address:
            return True
        end = min(end, self.size)
        pages = np.zeros(max(-(-(end - start) // mmap.PAGESIZE), 0), np.uint8)
        where, nbytes = ctypes.c_void_p(self._address + start), ctypes.c_size_t(max(end - start, 0))
        failed = _libc.mincore(where, nbytes, ctypes.c_void_p(pages.ctypes.data)) != 0
        return failed or bool(np.all(pages & 1))

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)


class _Own(threading.local):
    """A thread's own buffer, kept from one window to the next."""

    def __init__(self) -> None:
        self._memory: Bytes | None = None

    def memory(self) -> Bytes:
        """uint8 [DIRECT_BYTES + 2 * ALIGNMENT], aligned to pages."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(-1, DIRECT_BYTES + 2 * ALIGNMENT), np.uint8)
        return self._memory


_own = _Own()


class Window:
    """A range of a file, from `offset` to `end`, that one thread reads into buffers, block after block."""

    def __init__(self, file: File, offset: int, buffers: Iterable[memoryview]):
        self.file = file
        self.offset = offset
        self._targets = deque(buffers)
        self.end = offset + sum(map(len, self._targets))
        self._is_long = self.end - offset >= DIRECT_FROM
        self._held: Bytes = np.empty(0, np.uint8)
        """Bytes that were read ahead with O_DIRECT."""
        self._through_cache_until = 0
        """Offset up to which reads go through the page cache."""

    def fill_block(self) -> Block:
        """Fill the next block of the buffers, which ends at the next multiple of BLOCK_BYTES; returns it.

        Raises:
            Damaged: the file ends too early.
        """
        block = self._take(BLOCK_BYTES - self.offset % BLOCK_BYTES)
        left = block
        while left:
            if not len(self._held) and self._goes_direct():
                self._read_ahead()
            count = (
                self._copy_held(left[0]) if len(self._held) else os.preadv(self.file.fd, left, self.offset)
            )
            if count == 0:
                raise Damaged(f"{self.file.path}: ends at byte {self.offset}, but should be longer")
            self.offset += count
            left = _after(left, count)
        return block

    def _take(self, nbytes: int) -> Block:
        """The next `nbytes` of the buffers, or less."""
        block: Block = []
        while nbytes and self._targets and len(block) < MAX_BUFFERS:
            view = self._targets[0]
            if len(view) > nbytes:
                block.append(view[:nbytes])
                self._targets[0] = view[nbytes:]
                break
            block.append(self._targets.popleft())
            nbytes -= len(view)
        return block

    def _copy_held(self, view: memoryview) -> int:
        count = min(len(view), len(self._held))
        np.copyto(np.frombuffer(view, np.uint8, count), self._held[:count])
        self._held = self._held[count:]
        return count

    def _goes_direct(self) -> bool:
        """Whether to read the next bytes with O_DIRECT."""
        if self.file.direct_fd is None or self.offset < self._through_cache_until or not self._is_long:
            return False
        start, stop = self._next_direct()
        if self.file.is_cached(start, stop):
            self._through_cache_until = stop
            return False
        return True

    def _next_direct(self) -> tuple[int, int]:
        """First and last offset of the next read with O_DIRECT, both aligned."""
        start = self.offset // ALIGNMENT * ALIGNMENT
        stop, last = start + DIRECT_BYTES, -(-self.end // ALIGNMENT) * ALIGNMENT
        return start, stop if stop + 2 * ALIGNMENT < last else last

    def _read_ahead(self) -> None:
        """Read the next bytes into `_held`; none if the file ends here or O_DIRECT fails."""
        assert self.file.direct_fd is not None
        start, stop = self._next_direct()
        memory = _own.memory()[: stop - start]
        try:
            count = os.preadv(self.file.direct_fd, [memory.data], start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the device needs another alignment
                raise
            self._through_cache_until = stop
            return
        self._held = memory[self.offset - start : max(min(count, self.end - start), self.offset - start)]


def _after(block: Block, count: int) -> Block:
    """A block without its first `count` bytes."""
    while block and count >= len(block[0]):
        count -= len(block[0])
        block = block[1:]
    return [block[0][count:], *block[1:]] if count else block
