"""Which files hold records, how each is opened, and which of a folder are read."""

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from cairn.run.errors import CairnError

_BUFFER = 1 << 20


class BadRecord(CairnError):
    """A record, or a whole data set, can't be used; the message says which and why."""


KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "values", ".csv": "rows", ".parquet": "parquet"}
"""The kinds of data files by their endings."""
TEXT = ("lines", "values", "rows")
"""Those that Cairn reads itself, record by record; `datasets` reads the others."""


class _Zstd(io.RawIOBase):
    """The bytes of a file of Zstandard frames; the package's own reader takes a cut file for a whole one."""

    def __init__(self, path: Path, mode: str):
        self._file = open(path, mode)  # noqa: SIM115 # closed by `close`
        self._start()

    def _start(self) -> None:
        self._file.seek(0)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        """Whether the frame has any bytes yet."""
        self._left, self._place = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        offset += self._place if whence == io.SEEK_CUR else 0
        if offset < self._place:
            self._start()
        while self._place < offset and self._read(offset - self._place):
            pass
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        found = self._read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def _read(self, count: int) -> bytes:
        while not self._left:
            data = self._file.read(_BUFFER)
            if not data:
                if self._begun:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return b""
            while data:
                self._begun = True
                self._left += self._frame.decompress(data)
                data = b""
                if self._frame.eof:
                    data = self._frame.unused_data
                    self._frame, self._begun = zstandard.ZstdDecompressor().decompressobj(), False
        found, self._left = self._left[:count], self._left[count:]
        self._place += len(found)
        return found


COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _Zstd,
}
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""What reading a file raises that is cut, damaged or not there."""
SPLITS = {"test": "test", "eval": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""What files and folders are named that are not trained on by default, and the split that reads them."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def kind_of_file(name: str) -> str | None:
    """The kind of a data file by its ending; None if it is none."""
    return KINDS.get(Path(uncompressed(name)).suffix)


def uncompressed(name: str) -> str:
    """The name in lower case, without the ending of a compression."""
    path = Path(name.lower())
    return str(path.with_suffix("")) if path.suffix in COMPRESSIONS else str(path)


def is_compressed(path: Path) -> bool:
    """Whether the file's ending is that of a compression."""
    return path.suffix.lower() in COMPRESSIONS


def open_plain(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed.

    Raises:
        OSError: it can't be opened; reading raises `UNREADABLE`.
    """
    opened: Any = COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb")
    return cast("BinaryIO", io.BufferedReader(opened, _BUFFER))


@dataclass(frozen=True)
class Folder:
    """What a folder holds: the data files that are read for a split, in their order, and what is not read."""

    path: Path
    split: str
    read: Sequence[Path]
    of_other_splits: Sequence[Path]
    no_data: Sequence[Path]

    @property
    def said(self) -> str:
        """What is read and what is not, for the user."""
        named = [str(one.relative_to(self.path)) for one in self.read]
        said = f"{self.path}: reads {_listed(named)}"
        if self.of_other_splits:
            names = [str(one.relative_to(self.path)) for one in self.of_other_splits]
            said += f"; not read, since they are of other splits than {self.split}: {_listed(names)}"
        if self.no_data:
            names = [str(one.relative_to(self.path)) for one in self.no_data]
            said += f"; not read, since they are no data files: {_listed(names)}"
        return said


def look_into(folder: Path, split: str, setting: str) -> Folder:
    """The data files of a folder, of all folders below it, sorted by their paths.

    Hidden ones (a name that begins with a dot or an underscore) are left out. Files that are named, or whose
    folder is, as one of `SPLITS` are read for that split alone; all others for train.

    Raises:
        BadRecord: none is of the split; or they are of kinds that aren't read together.
    """
    found: list[tuple[str, Path]] = []
    others: list[Path] = []
    for path in _files(folder):
        if kind_of_file(path.name):
            found.append((_split_of(path.relative_to(folder)), path))
        else:
            others.append(path)
    if not found:
        endings = ", ".join(KINDS)
        there = f"; it has {_listed([one.name for one in others])}" if others else ""
        raise BadRecord(f"{folder}: the folder has no data files ({endings}){there}")
    read = [path for own, path in found if own == split]
    if not read:
        splits = ", ".join(sorted({own for own, _ in found}))
        raise BadRecord(f"{folder} has files of the split {splits}; {setting} is {split}")
    groups = {kind_of_file(path.name) == "parquet": path.name for path in read}
    if len(groups) > 1:
        raise BadRecord(
            f"{folder} has Parquet files ({groups[True]}) beside others ({groups[False]}), which are not "
            "read together; give two data sets (data.sets), each with its own folder"
        )
    return Folder(folder, split, read, [path for own, path in found if own != split], others)


def _files(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden, sorted; links to folders are followed once."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        true = os.path.realpath(place)
        folders[:] = [] if true in seen else [name for name in folders if name[0] not in "._"]
        if true not in seen:
            found += [Path(place) / name for name in names if name[0] not in "._"]
        seen.add(true)
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def _split_of(path: Path) -> str:
    """The split that a file is of, by its path below the folder."""
    stem = path.name
    while Path(stem).suffix.lower() in (*KINDS, *COMPRESSIONS):
        stem = Path(stem).stem
    names = [_SHARD.sub("", name.lower()) for name in (*path.parts[:-1], stem)]
    return next((SPLITS[name] for name in names if name in SPLITS), "train")


def _listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence, of which the first stand for all where they are many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{len(names)} files ({', '.join(names[:3])}, ..., {names[-1]})"
