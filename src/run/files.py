"""Files that other processes read while we write them."""

import errno
import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` so that a reader sees the old file or the new one, never half of it.

    With `durable` it also survives a power cut: the file and its folder are fsynced.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def read_json(path: Path) -> Any | None:
    """The file's content, or None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget_cached(fd: int) -> None:
    """Have the kernel read the file from the disk the next time; what is not yet durable stays."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def check_written(path: Path, data: bytes) -> None:
    """Compare what the disk, not the page cache, holds with what was made durable there.

    Raises:
        OSError: it is something else.
    """
    with open(path, "rb") as file:
        forget_cached(file.fileno())
        if file.read() != data:
            raise written_otherwise(path)


def written_otherwise(path: Path) -> OSError:
    """What is wrong with a disk that keeps other bytes than it was given."""
    return OSError(errno.EIO, "the disk returns other bytes than were written", str(path))
