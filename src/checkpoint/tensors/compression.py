"""Packed files: tensor files that are stored in compressed blocks, each of which can be read on its own.

Every rank compresses the ranges that it would otherwise write in place, and appends them to a file of its
own, `packed-<rank>.bin`, in the folder of the tensor files. `packed-<rank>.json` lists the blocks: which
bytes of which file each holds. So ranks need not know how much the others have compressed, and readers of any
number of ranks find the ranges that they hold. A block is the bytes themselves, or one frame of Zstandard
with the bytes of its values regrouped: first the lowest byte of every value, then the second of every value
and so on, since the high bytes of floating-point numbers resemble each other and the low ones do not.
"""

import bisect
import itertools
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, crc64
from cairn.checkpoint.manifest import Damaged, FileEntry, refuse_repeated_keys

BLOCK_BYTES = 4 << 20
"""Blocks end where the position in the file is a multiple of this, or where a rank's range ends."""
MAX_BLOCK_BYTES = 16 << 20
"""Readers refuse larger blocks, so that a hostile one can't fill the memory."""
MAX_WIDTH = 16
LEVEL = 1
"""Higher levels of Zstandard are slower and, on tensors, not smaller."""
MAX_TABLE_BYTES = 256 << 20
TABLE_NAME = re.compile(r"packed-(0|[1-9][0-9]*)\.json")

if TYPE_CHECKING:
    import zstandard


class _Own(threading.local):
    """A thread's own compressor: no two threads may use one."""

    def __init__(self) -> None:
        self._compressor: zstandard.ZstdCompressor | None = None

    def compressor(self) -> "zstandard.ZstdCompressor":
        """It, made by the first call."""
        import zstandard

        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        return self._compressor


_own = _Own()


@dataclass(frozen=True)
class Block:
    """Bytes `offset` to `offset + nbytes` of a file, stored in `data` from byte `at` on.

    width: bytes of a value in the regrouping of a compressed block; 0: it is stored as it is.
    """

    offset: int
    nbytes: int
    data: Path
    at: int
    stored: int
    width: int

    @property
    def end(self) -> int:
        """The file's byte behind the block."""
        return self.offset + self.nbytes

    def read(self) -> memoryview:
        """The block's bytes, unpacked.

        Raises:
            Damaged: the stored bytes are none that can be unpacked.
        """
        with open(self.data, "rb", buffering=0) as file:
            stored = os.pread(file.fileno(), self.stored, self.at)
        where = f"{self.data}: bytes {self.at} to {self.at + self.stored}"
        if len(stored) != self.stored:
            raise Damaged(f"{where}: the file ends earlier")
        return unpack(stored, self.nbytes, self.width, where)


@dataclass(frozen=True)
class PackedFile:
    """A file that exists only in blocks: the path that it would have, its size, and its blocks in order."""

    path: Path
    size: int
    blocks: tuple[Block, ...]

    def covering(self, offset: int, nbytes: int) -> tuple[Block, ...]:
        """The blocks that hold any of these bytes."""
        first = bisect.bisect_right(self.blocks, offset, key=lambda block: block.end)
        last = bisect.bisect_left(self.blocks, offset + nbytes, key=lambda block: block.offset)
        return self.blocks[first:last]

    def read(self, offset: int, nbytes: int) -> bytes:
        """A range of the file, or less where the file ends.

        Raises:
            Damaged: a block can't be unpacked.
        """
        parts: list[bytes] = []
        for block in self.covering(offset, nbytes):
            first, last = max(offset, block.offset), min(offset + nbytes, block.end)
            parts.append(bytes(block.read()[first - block.offset : last - block.offset]))
        return b"".join(parts)


def pack_blocks(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Cut a range of a file into blocks: (first byte, number of bytes) of each."""
    end = offset + nbytes
    cuts = [offset, *range((offset // BLOCK_BYTES + 1) * BLOCK_BYTES, end, BLOCK_BYTES), end]
    return [(first, last - first) for first, last in itertools.pairwise(cuts)]


def pack(data: memoryview | bytes, width: int) -> tuple[bytes, int]:
    """What a block is stored as, and its width: 0 where compression does not make it smaller."""
    packed = _own.compressor().compress(_group(data, width))
    return (packed, width) if len(packed) < len(data) else (bytes(data), 0)


def unpack(stored: bytes | memoryview, nbytes: int, width: int, where: str) -> memoryview:
    """The `nbytes` bytes that `pack` has stored with this width; `where` names them in errors.

    Raises:
        Damaged: they are none that can be unpacked.
    """
    import zstandard  # like numpy, imported where it is used: `ckpt --help` does without

    if not width:
        return memoryview(stored)
    try:
        if zstandard.frame_content_size(stored) != nbytes:
            raise Damaged(f"{where}: not a frame of {nbytes} bytes")
        grouped = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Damaged(f"{where}: can't be decompressed: {error}") from None
    return _ungroup(grouped, width)


def _group(data: memoryview | bytes, width: int) -> memoryview:
    """The bytes of whole values, regrouped by their place in the value; then what is left of `data`."""
    import numpy as np

    values = np.frombuffer(data, np.uint8)
    count = len(values) // width
    grouped = np.empty_like(values)
    for place in range(width):
        grouped[place * count : (place + 1) * count] = values[place : count * width : width]
    grouped[count * width :] = values[count * width :]
    return grouped.data


def _ungroup(data: bytes, width: int) -> memoryview:
    import numpy as np

    grouped = np.frombuffer(data, np.uint8)
    count = len(grouped) // width
    values = np.empty_like(grouped)
    for place in range(width):
        values[place : count * width : width] = grouped[place * count : (place + 1) * count]
    values[count * width :] = grouped[count * width :]
    return values.data


class PackWriter:
    """Writes `packed-<rank>.bin` and its table, in the folder `where` of the step `step`."""

    def __init__(self, step: Path, where: str, rank: int):
        self.data, self.table = f"{where}/packed-{rank}.bin", f"{where}/packed-{rank}.json"
        self._step = step
        self._file = open(step / self.data, "xb")  # noqa: SIM115 # `close` closes it
        self._blocks: dict[str, list[list[int]]] = {}
        self._crcs = [0]
        self._size = 0

    def add(self, name: str, offset: int, nbytes: int, packed: bytes, width: int) -> None:
        """Append a block of the file `name`."""
        entry = [offset, nbytes, self._size, len(packed), width]
        self._blocks.setdefault(name.rpartition("/")[2], []).append(entry)
        self._file.write(packed)
        left = memoryview(packed)
        while left:
            piece = left[: CHUNK_BYTES - self._size % CHUNK_BYTES]
            self._crcs[-1] = crc64(piece, self._crcs[-1])
            self._size += len(piece)
            if self._size % CHUNK_BYTES == 0:
                self._crcs.append(0)
            left = left[len(piece) :]

    def finish(self) -> dict[str, FileChecksum]:
        """Write the table; returns the checksums of both files by name. The caller fsyncs them."""
        self._file.close()
        table = (json.dumps({"files": self._blocks}, separators=(",", ":")) + "\n").encode()
        (self._step / self.table).write_bytes(table)
        of_data = FileChecksum(self._size, dict(enumerate(self._crcs)), self._size)
        return {self.data: of_data, self.table: FileChecksum.of(table)}

    def close(self) -> None:
        """Close the file, also if not all of it was written."""
        self._file.close()


def packed_files(folder: Path) -> dict[str, PackedFile]:
    """The packed files of a folder by their names, from the tables that lie in it.

    Raises:
        Damaged: a table is invalid, or the tables do not give every byte of a file exactly once.
    """
    found: dict[str, list[Block]] = {}
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in filter(TABLE_NAME.fullmatch, names):
        for file, blocks in _read_table(folder / name).items():
            found.setdefault(file, []).extend(blocks)
    files: dict[str, PackedFile] = {}
    for name, blocks in found.items():
        if name in names:
            raise Damaged(f"{folder / name}: is there both packed and as it is")
        position = 0
        ordered = tuple(sorted(blocks, key=lambda block: block.offset))
        for block in ordered:
            if block.offset != position:
                raise Damaged(f"{folder / name}: the tables have not every byte from {position} on once")
            position = block.end
        files[name] = PackedFile(folder / name, position, ordered)
    return files


def _read_table(path: Path) -> dict[str, list[Block]]:
    """The blocks that one table lists, by file."""
    data = path.with_suffix(".bin")
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise ValueError(f"it is larger than {MAX_TABLE_BYTES >> 20} MiB")
        content = json.loads(path.read_bytes(), object_pairs_hook=refuse_repeated_keys)
        entries = _entries(content)
        size = data.stat().st_size
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not a table of packed files: {error}") from None
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}") from None
    position = 0
    for at, stored in sorted((entry[2], entry[3]) for listed in entries.values() for entry in listed):
        if at != position:
            raise Damaged(f"{path}: a block begins at byte {at} of {data.name}, not at {position}")
        position = at + stored
    if position != size:
        raise Damaged(f"{data}: has {size} bytes, but its table describes {position}")
    return {
        name: [Block(offset, nbytes, data, at, stored, width) for offset, nbytes, at, stored, width in listed]
        for name, listed in entries.items()
    }


def _entries(content: Any) -> Mapping[str, list[list[int]]]:
    """The entries of a table by file, once they are valid each by itself."""
    whole = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if whole.keys() != {"files"} or not isinstance(whole["files"], dict):
        raise ValueError("it must be an object with the one key files")
    entries = cast("dict[str, list[list[int]]]", whole["files"])
    for name, listed in entries.items():
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ValueError(f"{name!r} is not the name of a tensor file")
        if type(listed) is not list or not listed:
            raise ValueError(f"{name} must have a list of blocks")
        for entry in listed:
            if type(entry) is not list or len(entry) != 5 or any(type(n) is not int for n in entry):
                raise ValueError(f"{name}: a block must be five whole numbers")
            offset, nbytes, at, stored, width = entry
            if not (offset >= 0 and 0 < nbytes <= MAX_BLOCK_BYTES and at >= 0 and 0 < stored <= nbytes):
                raise ValueError(f"{name}: not the numbers of a block: {entry}")
            if not 0 <= width <= MAX_WIDTH or (stored == nbytes) != (width == 0):
                raise ValueError(f"{name}: not the width of a block: {entry}")
    return entries


def check_tables(step: Path, contents: Mapping[str, FileEntry]) -> None:
    """See that the tables in a step's folders describe these files, each with the size that it should have.

    Raises:
        Damaged: they do not, or a table is invalid.
    """
    folders = {name.rpartition("/")[0] for name in contents}
    described = {f"{where}/{name}": f for where in folders for name, f in packed_files(step / where).items()}
    if other := sorted(described.keys() ^ contents.keys()):
        which = "no table describes it" if other[0] in contents else "does not belong to the checkpoint"
        raise Damaged(f"{step / other[0]}: {which}")
    for name, file in described.items():
        if file.size != contents[name].size:
            raise Damaged(f"{step / name}: has {file.size} bytes, but should have {contents[name].size}")
