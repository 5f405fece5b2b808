"""The layout of tensors in safetensors files: which bytes of which file hold which tensor.

The layout depends only on names, data types and shapes. So every rank computes the same one without
communication, and the files do not depend on the number of ranks. The format is safetensors': eight bytes of
header length, a JSON header padded with spaces, then the tensors without gaps.
"""

import errno
import io
import json
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cairn.checkpoint.manifest import CheckpointError, Damaged, refuse_repeated_keys
from cairn.checkpoint.tensors.compression import PackedFile, packed_files
from cairn.checkpoint.tensors.remote_ranges import MAX_HEADER_BYTES, AwayFile, away_files

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}
ALIGNMENT = 4096  # tensor data starts at a page boundary, as O_DIRECT requires
DIRECT_BYTES = 256 << 10  # shorter ranges go through the page cache
MAX_FILE_BYTES = 5 << 30
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\0]+")


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor in a file; `dtype` is safetensors' name, such as F32."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file: its header, and the offset of each tensor from the start of the file."""

    name: str
    header: bytes
    offsets: dict[str, int]
    size: int


def plan(
    specs: list[TensorSpec],
    stem: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    apart: Collection[str] = (),
) -> tuple[list[FileLayout], bytes | None]:
    """Distribute tensors over files in the given order, and make the index that Hugging Face expects.

    Args:
        apart: tensors that come first, in files of their own.

    Returns the files and the content of `<stem>.safetensors.index.json`, which is None for a single file.
    """
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    ordered = sorted(specs, key=lambda spec: spec.name not in apart)
    for spec in ordered:
        changes = bool(groups[-1]) and (spec.name in apart) != (groups[-1][-1].name in apart)
        if groups[-1] and (changes or filled + spec.nbytes > max_file_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    if len(groups) == 1:
        return [_plan_file(groups[0], f"{stem}.safetensors")], None
    files = [
        _plan_file(group, f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors")
        for i, group in enumerate(groups, start=1)
    ]
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": {name: file.name for file in files for name in file.offsets},
    }
    return files, (json.dumps(index, indent=2) + "\n").encode()


def _plan_file(specs: list[TensorSpec], name: str) -> FileLayout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    starts: dict[str, int] = {}
    for spec in specs:
        starts[spec.name] = position
        end = position + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = math.ceil((8 + len(text)) / ALIGNMENT) * ALIGNMENT - 8
    header = struct.pack("<Q", length) + text.ljust(length)
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return FileLayout(name, header, offsets, len(header) + position)


@dataclass(frozen=True)
class Extent:
    """A range of a file whose bytes one rank holds, and their position in that rank's arena."""

    file: int
    offset: int
    nbytes: int
    arena: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes: extents by file and offset, which is also the order in the arena.

    starts: by tensor, the arena position of each of its ranges. headers: arena position and file of each
    header; rank 0 writes them. arena_bytes: size of an arena that holds all of it at once.
    """

    extents: list[Extent]
    starts: dict[str, list[int]]
    headers: list[tuple[int, int]]
    arena_bytes: int


def plan_rank(
    files: list[FileLayout], held: Mapping[str, Sequence[tuple[int, int]]], *, with_headers: bool
) -> RankPlan:
    """Lay out a rank's arena so that each extent can be written with few, large, aligned writes.

    Args:
        held: for each tensor the ranges that this rank writes, in ascending order: (first byte, number of
            bytes), counted from the tensor's start.
        with_headers: whether this rank writes the headers.
    """
    extents: list[Extent] = []
    starts: dict[str, list[int]] = {}
    headers: list[tuple[int, int]] = []
    cursor = 0
    for number, file in enumerate(files):
        pieces = [
            (start + first, nbytes, name)
            for name, start in file.offsets.items()
            for first, nbytes in held.get(name, ())
        ]
        if with_headers:
            pieces.insert(0, (0, len(file.header), ""))
        for begin, end, members in _join([piece for piece in pieces if piece[1]]):
            if end - begin >= DIRECT_BYTES:  # O_DIRECT needs the same alignment in memory and file
                cursor = -(-cursor // ALIGNMENT) * ALIGNMENT + begin % ALIGNMENT
            for offset, _, name in members:
                if name:
                    starts.setdefault(name, []).append(cursor + offset - begin)
                else:
                    headers.append((cursor, number))
            extents.append(Extent(number, begin, end - begin, cursor))
            cursor += end - begin
    return RankPlan(extents, starts, headers, max(cursor, 1))


def ring_pieces(position: int, nbytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Where a range of arena positions is in an arena of `size` bytes, which it may be larger than.

    Position `size` is at byte 0 again. Yields (bytes before the piece, its first byte, its bytes).
    """
    done = 0
    while done < nbytes:
        first = (position + done) % size
        count = min(nbytes - done, size - first)
        yield done, first, count
        done += count


def _join(pieces: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, list[tuple[int, int, str]]]]:
    """Join pieces (offset, bytes, name) that are adjacent; yields begin, end and the joined pieces."""
    members: list[tuple[int, int, str]] = []
    end = 0
    for piece in pieces:
        if members and piece[0] != end:
            yield members[0][0], end, members
            members = []
        members.append(piece)
        end = piece[0] + piece[1]
    if members:
        yield members[0][0], end, members


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file, where its values lie in row-major order; a `formats.Source`.

    packed: where the file's bytes are, if it is packed; there is then no file at `path`. away: the same, if
    they are in an object store.
    """

    path: Path
    offset: int
    spec: TensorSpec
    packed: PackedFile | None = None
    away: AwayFile | None = None

    def fill(self, first: int, into: "torch.Tensor") -> None:
        """Read values, beginning with value `first`, into a flat tensor, converting the data type.

        Raises:
            Damaged: the file ends too early.
            CheckpointError: the data type can't be read.
        """
        from cairn.checkpoint.tensors.reader import (
            DTYPES,  # imports torch, which planning does without
            ReadRange,
            read_pieces,
        )

        if self.spec.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {self.spec.name} has data type {self.spec.dtype}, which can't be read"
            )
        dtype = DTYPES[self.spec.dtype]
        offset = self.offset + first * dtype.itemsize
        piece = ReadRange(self.path, offset, dtype, into, counted=False, packed=self.packed, away=self.away)
        read_pieces([piece])


def find_tensors(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """All tensors of `tensor_files(folder, stem)`, by name.

    Raises:
        FileNotFoundError: there are no such files.
        Damaged: the index or a header is invalid.
    """
    found: dict[str, StoredTensor] = {}
    packed, away = packed_files(folder), away_files(folder)
    for path in tensor_files(folder, stem, packed):
        for tensor in read_header(path, packed.get(path.name), away.get(path.name)):
            found[tensor.spec.name] = tensor
    return found


def tensor_files(folder: Path, stem: str, packed: Collection[str] = ()) -> list[Path]:
    """`<stem>.safetensors` if it exists, as in transformers, otherwise the files that the index names.

    Every reader of a model folder calls this, so that all read the same tensors.

    Args:
        packed: the names of packed files in the folder; they count as files.

    Raises:
        FileNotFoundError: there is neither.
        Damaged: the index is invalid, or a file that it names is missing.
    """
    single = folder / f"{stem}.safetensors"
    if single.exists() or single.name in packed:
        return [single]
    index = folder / f"{stem}.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except FileNotFoundError:
        missing = f"holds neither {single.name} nor {index.name}"
        raise FileNotFoundError(errno.ENOENT, missing, str(folder)) from None
    except (*MALFORMED, OSError) as error:
        raise Damaged(f"{index}: not an index of safetensors files: {error}") from None
    if outside := [name for name in names if type(name) is not str or not PLAIN_NAME.fullmatch(name)]:
        raise Damaged(f"{index}: names a file outside its folder: {outside[0]!r}")
    if absent := [name for name in names if name not in packed and not (folder / name).is_file()]:
        raise Damaged(f"{index}: names {absent[0]}, which does not exist")
    return [folder / name for name in names]


def read_header(
    path: Path, packed: PackedFile | None = None, away: AwayFile | None = None
) -> list[StoredTensor]:
    """The tensors of a safetensors file, which may be packed or away, in file order.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: the header is too large, not valid JSON, or does not describe exactly the file's bytes.
    """
    if packed is None and path.is_dir():
        raise Damaged(f"{path}: is a folder, not a safetensors file")
    whole = packed or away
    size = whole.size if whole else path.stat().st_size
    with io.BytesIO(packed.read(0, 8)) if packed else open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise Damaged(f"{path}: not a whole safetensors file: the header would be {length} bytes long")
        text = packed.read(8, length) if packed else file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=refuse_repeated_keys)
        entries.pop("__metadata__", None)
        spans = sorted((_span(name, entry) for name, entry in entries.items()), key=lambda span: span[:2])
    except MALFORMED as error:
        raise Damaged(f"{path}: not a safetensors header: {error}") from None
    position = 0
    for start, end, spec in spans:
        if start != position or end - start != spec.nbytes:
            raise Damaged(f"{path}: {spec.name} does not begin where the tensor before it ends")
        position = end
    if position != size - 8 - length:
        raise Damaged(f"{path}: has {size} bytes, but its header describes {8 + length + position}")
    return [StoredTensor(path, 8 + length + start, spec, packed, away) for start, _, spec in spans]


def _span(name: str, entry: dict[str, Any]) -> tuple[int, int, TensorSpec]:
    """Begin and end of a tensor in the data, and its spec, from its header entry."""
    start, end = entry["data_offsets"]
    shape = cast("list[Any]", entry["shape"]) if isinstance(entry["shape"], list) else None
    if shape is None or any(type(n) is not int or n < 0 for n in [start, end, *shape]):
        raise ValueError(f"{name}: shape and data_offsets must be whole numbers >= 0")
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{name}: unknown data type {entry['dtype']!r}")
    return start, end, TensorSpec(name, entry["dtype"], tuple(shape))
