"""The folder for what can be made again: indexes of data files, and decompressed copies of some."""

import hashlib
import json
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from awscrt import checksums as crt  # pyright: ignore[reportMissingTypeStubs] # it is typed in its code

from cairn.run.errors import CairnError
from cairn.run.files import write_json

_READ_BYTES = 1 << 20


def folder() -> Path:
    """The folder of the cache, which is the user's."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn" / "records"


def name_of(about: object) -> str:
    """The name of what is kept for a JSON value."""
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()


def crc64(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """The CRC-64/NVME of `data`, continuing after bytes whose CRC is `previous`."""
    return crt.crc64nvme(data, previous)  # pyright: ignore[reportArgumentType] # it takes any buffer


def content_of(path: Path) -> str:
    """What tells the file's bytes from others: their number, and their CRC-64.

    All bytes are read, each time: a file that was changed may have the same size and times.

    Raises:
        OSError: it can't be read.
    """
    crc, size, buffer = 0, 0, bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, size = crc64(view[:count], crc), size + count
    return f"{size}-{crc:016x}"


def read_note(name: str) -> Mapping[str, Any] | None:
    """What was noted under a name; None if nothing was, or it is damaged."""
    try:
        found = json.loads((folder() / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType] # JSON


def keep_note(name: str, value: Mapping[str, Any]) -> bool:
    """Note something under a name; returns whether there was room for it."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_json(folder() / f"{name}.json", value)
    except OSError:
        return False
    return True


class CacheError(CairnError):
    """The cache can't be written; the message names it, and what moves it."""

    def __init__(self, error: OSError):
        super().__init__(f"the cache {folder()} (moved with XDG_CACHE_HOME): {error.strerror}")


class Writing:
    """A file of the cache that is being written."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes.

        Raises:
            CacheError: there is no room.
        """
        try:
            self._file.write(data)
        except OSError as error:
            raise CacheError(error) from None


@contextmanager
def writing(name: str) -> Generator[Writing]:
    """A file of the cache that appears under its name once it is whole.

    Raises:
        CacheError: it can't be written.
    """
    path = folder() / name
    temporary = path.with_name(f".{name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        try:
            folder().mkdir(parents=True, exist_ok=True)
            file = open(temporary, "wb", buffering=0)  # noqa: SIM115 # closed below
        except OSError as error:
            raise CacheError(error) from None
        with file:
            yield Writing(file)
        try:
            os.replace(temporary, path)
        except OSError as error:
            raise CacheError(error) from None
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
