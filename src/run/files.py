"""Files that other processes read while we write them, and that a crash may leave in any state."""

import contextlib
import errno
import functools
import json
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cairn.run.errors import CairnError
from cairn.run.file_system import look_anew

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


class DamagedFile(CairnError):
    """A file does not hold what it should; the message names it and says what is wrong."""


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Have every OSError name `path`: that of a full disk, for one, names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomic(path: Path, data: bytes, *, durable: bool = False, private: bool = False) -> None:
    """Write `data` so that a reader sees the old file or the new one, never half of it.

    Args:
        durable: it also survives a power cut: the file and its folder are fsynced.
        private: no other user may read it.
    """
    # Two threads of a process, such as a signal's and a watcher's, may write one file at a time.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    with naming(path):
        try:
            # Whoever opens a file before its mode is changed reads what is written afterwards.
            mode = 0o600 if private else 0o666
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):  # it would take the space that a full disk lacks
                temporary.unlink()
            raise
        if durable:
            sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False, private: bool = False) -> None:
    """Write `value` as indented JSON, as `write_atomic` does."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable, private=private)


def read_json(path: Path, shape: type[T] = object) -> T | None:
    """The file's content, or None if there is no such file.

    Args:
        shape: what the content has to be, such as `list[int]` or a dataclass, of which it becomes one.

    Raises:
        DamagedFile: the file is empty, torn, garbage, of another shape, or can't be read.
    """
    content = _content(path)
    if content is None and look_anew(path.parent):
        content = _content(path)
    if content is None:
        return None
    if not content:
        raise DamagedFile(f"{path}: is empty")
    try:
        return json.loads(content) if shape is object else parse_json(content, shape)
    except RecursionError:
        raise DamagedFile(f"{path}: is damaged: it is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or of another shape
        raise DamagedFile(f"{path}: is damaged: {_first_problem(error)}") from None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFile(f"{path}: can't be read: {error.strerror}") from None


def read_note(path: Path, shape: type[T] = object) -> T | None:
    """As `read_json`, but None whatever is wrong with the file.

    For messages and heartbeats: an unreadable one counts as not there. Its writer writes it again, or the
    reader's deadline passes.
    """
    try:
        return read_json(path, shape)
    except DamagedFile:
        return None


def parse_json(content: str | bytes, shape: type[T]) -> T:
    """The JSON `content` as what `shape` says; see `read_json`.

    Raises:
        ValueError: it is no JSON, or of another shape.
    """
    return _adapter(shape).validate_json(content, strict=True)


@functools.cache
def _adapter(shape: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter  # which the processes that write checkpoints do without

    return TypeAdapter(shape)


def _first_problem(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def set_aside(path: Path) -> Path:
    """Move a damaged file, or whatever is in its place, out of the way; returns its new path."""
    aside = free_name(path)
    os.rename(path, aside)
    return aside


def free_name(path: Path) -> Path:
    """`path` with the first `.damaged-N` at its end that nobody has."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside


def entries(folder: Path, suffix: str) -> list[Path]:
    """What lies in a folder under names that end so, hidden files left out; nothing if it is no folder."""
    look_anew(folder)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if name.endswith(suffix) and not name.startswith(".")]


def safetensors_bytes(folder: Path) -> int:
    """Bytes of the safetensors files that lie in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def make_folders(path: Path) -> None:
    """Make a folder, and those above it that are missing, durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path, *, forget: bool = False) -> None:
    """Make a file's bytes, or a folder's entries, durable.

    Args:
        forget: also drop the file from the page cache; see `forget_cached`.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if forget:
            forget_cached(fd)
    finally:
        os.close(fd)


def forget_cached(fd: int) -> None:
    """Drop the file from the page cache, so that the next read comes from the disk; unwritten pages stay."""
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
    """The error for a disk that returns other bytes than it was given."""
    return OSError(errno.EIO, "the disk returns other bytes than were written", str(path))
