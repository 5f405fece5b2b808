"""Tensor files in an object store, or in the memory of several nodes, where each rank reads its own ranges.

A step that a run resumes from, and that no local disk has, gets a folder with its manifest, its small files,
and the beginning of every tensor file: all that comes before the first value. Beside it lies
`step_N.away.json`, which says where the rest is. A reader that does not know of that note finds files that
are too short, and so takes the folder for a damaged step, never for a whole one.
"""

import functools
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import Damaged, FileEntry, check_crc
from cairn.checkpoint.tensors.node_ranges import SCHEME, NodeReader
from cairn.run.files import read_json, write_json
from cairn.run.object_store import ObjectReader, RemoteError

READERS = 8
"""Ranges that a process reads at once."""


@dataclass(frozen=True)
class AwayFile:
    """A file of which only the beginning is at `path`: the whole is the object `name` below the URL `store`,
    which may be the memory of nodes.

    size: of the whole, in bytes.
    """

    path: Path
    store: str
    name: str
    size: int

    @property
    def url(self) -> str:
        return f"{self.store}/{self.name}"

    def read(self, offset: int, count: int) -> bytes | memoryview:
        """The bytes `offset` to `offset + count`.

        Raises:
            Damaged: the file ends earlier, or the object store, or a node, refuses or fails.
        """
        with open(self.path, "rb") as file:
            file.seek(offset)
            here = file.read(count)
        if len(here) == count:
            return here
        first = offset + len(here)
        try:
            rest = _opened(self.store).read(self.name, first, count - len(here))
        except RemoteError as error:
            raise Damaged(str(error)) from None
        except OSError as error:
            raise Damaged(f"{self.url}: {error}") from None
        if len(here) + len(rest) != count:
            raise Damaged(f"{self.url}: ends at byte {first + len(rest)}, but should be longer")
        return here + rest if here else rest


@dataclass(frozen=True)
class _Note:
    """The content of step_N.away.json: the URL of the store, and the sizes of the files that are there."""

    store: str
    sizes: dict[str, int]


def note_away(step: Path, store: str, sizes: Mapping[str, int]) -> None:
    """Note that of these files of a step, by name, the folder `step` has the beginnings only.

    Args:
        store: URL below which the objects have the names `step_N/FILE`.
    """
    write_json(_note_of(step), asdict(_Note(store, dict(sizes))))


def away_in_step(step: Path) -> dict[str, AwayFile]:
    """The files of which the folder of a step has the beginnings only, by name; empty for any other folder.

    Raises:
        DamagedFile: the note is damaged.
    """
    note = read_json(_note_of(step), _Note)
    if note is None:
        return {}
    return {
        name: AwayFile(step / name, note.store, f"{step.name}/{name}", size)
        for name, size in note.sizes.items()
    }


def away_files(folder: Path) -> dict[str, AwayFile]:
    """Those files that lie in `folder`, such as the `model/` or `trainer/critic/` of a step, by name."""
    files = away_in_step(folder.parent) or away_in_step(folder.parent.parent)
    return {file.path.name: file for file in files.values() if file.path.parent == folder}


def check_away(
    files: Mapping[str, AwayFile],
    entries: Mapping[str, FileEntry],
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Read all of these files, and compare them with their checksums.

    Raises:
        Damaged: a file was changed or can't be read; the message names it and the position.
    """

    def check(place: tuple[str, int]) -> int:
        name, chunk = place
        entry, first = entries[name], chunk * CHUNK_BYTES
        data = files[name].read(first, min(CHUNK_BYTES, entry.size - first))
        try:
            check_crc(files[name].path, entry, chunk, crc64(data))
        except Damaged as error:
            raise Damaged(str(error).replace(str(files[name].path), files[name].url)) from None
        return len(data)

    places = [(name, chunk) for name in files for chunk in range(len(entries[name].crc64nvme))]
    with ThreadPoolExecutor(READERS) as pool:
        for count in pool.map(check, places):
            on_bytes(count)


def _note_of(step: Path) -> Path:
    return step.parent / f"{step.name}.away.json"


FIRST_BYTES = 64 << 10
"""Bytes of a tensor file that are read first; its header is seldom longer."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


def beginning(read: Callable[[int, int], bytes | memoryview], size: int, where: str) -> bytes:
    """All that comes before the values of a safetensors file of `size` bytes.

    Args:
        read: returns bytes of the file, from their first and their number.
        where: names the file in the error.

    Raises:
        Damaged: it is no such file.
    """
    first = bytes(read(0, min(FIRST_BYTES, size)))
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else size
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise Damaged(f"{where}: the header would be {length} bytes long")
    missing = 8 + length - len(first)
    more = bytes(read(len(first), missing)) if missing > 0 else b""
    return (first + more)[: 8 + length]


class RangeReader(Protocol):
    """Reads ranges of files by name."""

    def read(self, name: str, first: int, count: int, /) -> bytes | memoryview:
        """The bytes `first` to `first + count`.

        Raises:
            OSError, RemoteError: they can't be read.
        """
        ...


@functools.lru_cache(maxsize=16)
def _opened(url: str) -> RangeReader:
    """A process opens a store once."""
    return NodeReader(url) if url.startswith(SCHEME) else ObjectReader(url)
