"""What a PyTorch distributed checkpoint (DCP) holds, by its `.metadata`, and its tensors.

They are read in parts, from the chunks that the ranks of the program wrote.
"""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.layout import PLAIN_NAME, TensorSpec
from cairn.checkpoint.tensors.reader import DTYPE_NAMES
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import pieces_of
from cairn.formats.common.tensor_views import TensorSection
from cairn.formats.dcp.dcp_programs import FILE_NAME
from cairn.formats.torch_file.safe_pickle import (
    ForbiddenPickle,
    PickledObject,
    ignored,
    load,
    ordered_dict,
    record,
)
from cairn.formats.torch_file.torch_stream import MAX_VALUES, SavedTensor, Size, Stream, locate

MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    begin: its first value's position in the whole tensor, by dimension. stacked: how many dimensions of
    length one the file's tensor has before those of `shape`.
    """

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    stream: Stream
    stacked: int = 0


@dataclass(frozen=True)
class DcpTensor:
    """A whole tensor; its chunks hold every value once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpIndex:
    """All that a folder holds, by key: tensors, and other values."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Stream]


_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "BytesIOWriteData"),
}
_RECORD_KINDS = {name: record(name[1]) for name in _RECORDS}
ALLOWED: Mapping[tuple[str, str], Any] = {
    **_RECORD_KINDS,
    ("torch", "Size"): Size,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPE_NAMES},
    ("torch.serialization", "_get_layout"): ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): ignored,
    (_PLANNER, "WriteItemType"): ignored,
    ("pathlib", "PosixPath"): ignored,
    ("pathlib._local", "PosixPath"): ignored,
    ("collections", "OrderedDict"): ordered_dict,
}
"""What the file may name, all of which torch writes, and what stands for it."""


def read_metadata(folder: Path) -> DcpIndex:
    """What the folder holds, as its `.metadata` says; no tensor is read.

    Raises:
        FileNotFoundError: the folder has no such file.
        Refused: the file names what is not allowed, or asks for absurd sizes.
        Damaged: the file is not whole, or does not fit to the folder's files.
    """
    path = folder / FILE_NAME
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ForbiddenPickle(f"{path}: has {size} bytes; at most {MAX_BYTES} are read")
    data = path.read_bytes()
    try:
        return _index(folder, load(data, ALLOWED), len(data))
    except ForbiddenPickle as error:
        raise ForbiddenPickle(f"{path}: {error}") from None
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path}: not the metadata of a checkpoint: {type(error).__name__}: {error}") from None


def _index(folder: Path, metadata: object, max_chunks: int) -> DcpIndex:
    """Check what the file holds.

    Args:
        max_chunks: more chunks than a file of this length can list one by one.
    """
    fields = _fields(metadata, "Metadata")
    streams: dict[tuple[str, tuple[int, ...] | None], Stream] = {}
    sizes: dict[str, int] = {}
    for index, info in fields["storage_data"].items():
        where = _fields(index, "MetadataIndex")
        offset = where.get("offset")
        if type(where["fqn"]) is not str or not (offset is None or isinstance(offset, Size)):
            raise Damaged("an entry has no name")
        key = (where["fqn"], None if offset is None else tuple(offset))
        if key in streams:
            raise Damaged(f"{key[0]} is stored twice at {list(key[1] or ())}")
        streams[key] = _stream(folder, info, key[0], sizes)
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, Stream] = {}
    count = 0
    for name, entry in fields["state_dict_metadata"].items():
        if type(name) is not str:
            raise Damaged(f"a key is not a string but {name!r}")
        if isinstance(entry, _RECORD_KINDS[_METADATA, "BytesStorageMetadata"]):
            if (name, None) not in streams:
                raise Damaged(f"no file holds {name}")
            values[name] = streams[name, None]
            continue
        about = _fields(entry, "TensorStorageMetadata")
        count += len(about["chunks"])
        if count > max_chunks:
            raise ForbiddenPickle("lists the same chunks again and again")
        tensors[name] = _tensor(name, about, streams)
    return DcpIndex(tensors, values)


def _fields(value: object, kind: str) -> dict[str, Any]:
    if not isinstance(value, PickledObject) or type(value).__name__ != kind:
        raise Damaged(f"holds a {type(value).__name__} where a {kind} should be")
    return value.fields


def _stream(folder: Path, info: object, key: str, sizes: dict[str, int]) -> Stream:
    """The place of a value; `sizes` has the files' sizes found so far, in bytes."""
    about = _fields(info, "_StorageInfo")
    name, offset, length = about["relative_path"], about["offset"], about["length"]
    if about.get("transform_descriptors"):
        raise ForbiddenPickle(
            f"{key} is compressed ({about['transform_descriptors']!r}), which Cairn does not read"
        )
    if type(name) is not str or not PLAIN_NAME.fullmatch(name):
        raise ForbiddenPickle(f"{key} lies in {name!r}, which is not a plain file name")
    if name not in sizes:
        if not (folder / name).is_file():
            raise Damaged(f"{key} lies in {name}, which does not exist")
        sizes[name] = (folder / name).stat().st_size
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise Damaged(f"{key} has offset {offset!r} and length {length!r}")
    if offset + length > sizes[name]:
        raise Damaged(f"{key} ends at byte {offset + length} of {name}, which has {sizes[name]}")
    return Stream(folder / name, offset, length)


def _tensor(
    name: str, about: Mapping[str, Any], streams: Mapping[tuple[str, tuple[int, ...] | None], Stream]
) -> DcpTensor:
    dtype = next(iter(_values(about["properties"])), None)
    if not isinstance(dtype, torch.dtype) or not isinstance(about["size"], Size):
        raise Damaged(f"{name} has no data type or no shape")
    shape = tuple(about["size"])
    chunks: list[Chunk] = []
    for entry in about["chunks"]:
        part = _fields(entry, "ChunkStorageMetadata")
        begin, sizes = part["offsets"], part["sizes"]
        if not isinstance(begin, Size) or not isinstance(sizes, Size):
            raise Damaged(f"a chunk of {name} has no place")
        if len(begin) != len(shape) or len(sizes) != len(shape):
            raise Damaged(f"a chunk of {name} has other dimensions than the tensor")
        if not math.prod(sizes):
            continue  # ranks with no rows of it
        if any(b + n > whole for b, n, whole in zip(begin, sizes, shape, strict=True)):
            raise Damaged(f"a chunk of {name} reaches beyond its shape {list(shape)}")
        if (name, tuple(begin)) not in streams:
            raise Damaged(f"no file holds {name} at {list(begin)}")
        chunks.append(Chunk(tuple(begin), tuple(sizes), streams[name, tuple(begin)]))
    if math.prod(shape) > MAX_VALUES:
        raise ForbiddenPickle(f"{name} has the absurd shape {list(shape)}")
    check_covered(name, shape, chunks)
    return DcpTensor(dtype, shape, tuple(chunks))


def _values(properties: object) -> tuple[Any, ...]:
    if not isinstance(properties, _RECORD_KINDS[_METADATA, "TensorProperties"]):
        raise Damaged("a tensor has no properties")
    return properties.values


def check_covered(name: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> None:
    """Check that the chunks hold every value once.

    Raises:
        Damaged: values are missing, or are in two chunks.
    """
    chunks = sorted(chunks, key=lambda chunk: chunk.begin)
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise Damaged(f"the chunks of {name} do not hold each of its values once")
    depth = 0  # how many of the first dimensions count tensors that are stacked
    while depth + 1 < len(shape) and all(chunk.shape[depth] == 1 for chunk in chunks):
        depth += 1
    for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.begin[:depth]):
        if _overlap(list(group), depth):
            raise Damaged(f"two chunks of {name} hold the same values")


def _overlap(chunks: list[Chunk], depth: int) -> bool:
    """Whether two chunks that agree before `depth` hold the same value; sorted by where they begin."""
    for number, one in enumerate(chunks):
        for later in range(number + 1, len(chunks)):
            other = chunks[later]
            if not one.shape or other.begin[depth] >= one.begin[depth] + one.shape[depth]:
                break  # nor does any later chunk
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(one.begin, one.shape, other.begin, other.shape, strict=True)
            ):
                return True
    return False


@dataclass(frozen=True)
class DcpSource:
    """A whole tensor of a folder.

    The CRC-32 that torch wrote beside each chunk is compared once all values of the chunk have been read, and
    whenever they are read at once.
    """

    spec: TensorSpec
    _tensor: DcpTensor
    _located: dict[Chunk, SavedTensor] = field(default_factory=dict[Chunk, SavedTensor], compare=False)

    @classmethod
    def of(cls, name: str, tensor: DcpTensor, located: dict[Chunk, SavedTensor] | None = None) -> "DcpSource":
        """The tensor, under a name of the caller's choice.

        Args:
            located: the chunks, where it is known where they lie; their streams are not used then.
        """
        return cls(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tensor.shape), tensor, located or {})

    def fill(self, first: int, into: torch.Tensor) -> None:
        """Read consecutive values.

        Raises:
            Damaged: a file ends too early, or is not what its metadata says.
        """
        shape = self._tensor.shape or (1,)
        inner = math.prod(shape[1:])
        if not into.numel():
            return
        begin, end = first // inner, -(-(first + into.numel()) // inner)
        for chunk, low, high in self._overlaps(begin, end):
            values, top = self._values(chunk), (chunk.begin or (0,))[0]
            begins, ends = max(low * inner, first), min(high * inner, first + into.numel())
            same_rows = chunk.shape[1:] == shape[1:]
            if same_rows and values.in_order:  # the chunk's values lie together in `into`
                values.fill_and_check(begins - top * inner, into[begins - first : ends - first])
                continue
            # Pieces may begin and end within rows that a chunk holds whole.
            taken = ends - begins if same_rows else (high - low) * math.prod(chunk.shape[1:])
            with values.rows(low - top, high - top, taken=taken) as rows:
                self._scatter(chunk, low, rows, first, into)

    def _overlaps(self, begin: int, end: int) -> Iterator[tuple[Chunk, int, int]]:
        """The chunks that hold rows from `begin` to `end`, with the first and last of these rows in each."""
        for chunk in self._tensor.chunks:
            top, count = (chunk.begin or (0,))[0], (chunk.shape or (1,))[0]
            low, high = max(begin, top), min(end, top + count)
            if low < high:
                yield chunk, low, high

    def _values(self, chunk: Chunk) -> SavedTensor:
        """Where a chunk's values are."""
        if chunk not in self._located:
            stacked = (1,) * chunk.stacked
            found = locate(self.spec.name, chunk.stream, self._tensor.dtype, (*stacked, *chunk.shape))
            strides = found.strides[chunk.stacked :]
            self._located.setdefault(chunk, replace(found, shape=chunk.shape, strides=strides))
        return self._located[chunk]

    def _scatter(self, chunk: Chunk, low: int, rows: torch.Tensor, first: int, into: torch.Tensor) -> None:
        """Put rows of a chunk where they belong in `into`; the chunk may lack parts of these rows."""
        shape = self._tensor.shape or (1,)
        inner = math.prod(shape[1:])
        where = tuple(slice(b, b + n) for b, n in zip(chunk.begin[1:], chunk.shape[1:], strict=True))
        for number, row in enumerate(rows, start=low):
            start = number * inner - first
            if start >= 0 and start + inner <= into.numel():
                into[start : start + inner].view(shape[1:])[where] = row
                continue
            skip, stop = max(-start, 0), min(inner, into.numel() - start)  # a row that `into` holds in part
            mine = torch.zeros(shape[1:], dtype=torch.bool)
            mine[where] = True
            whole = torch.zeros(shape[1:], dtype=row.dtype)
            whole[where] = row
            mine, whole = mine.view(-1)[skip:stop], whole.view(-1)[skip:stop]
            target = into[start + skip : start + stop]
            target[mine] = whole[mine]


def unstacked(name: str, tensor: DcpTensor, depth: int) -> dict[tuple[int, ...], TensorSource]:
    """The tensors of the same shape that one of more dimensions holds, such as the layers of a model.

    Args:
        name: of each.
        depth: how many of the first dimensions count them.

    Returns:
        Each by its position in these dimensions.
    """
    shape = tensor.shape[depth:]
    indices = itertools.product(*map(range, tensor.shape[:depth]))
    if all(chunk.shape[:depth] == (1,) * depth for chunk in tensor.chunks):
        parts: dict[tuple[int, ...], list[Chunk]] = {}
        for c in tensor.chunks:
            part = Chunk(c.begin[depth:], c.shape[depth:], c.stream, depth)
            parts.setdefault(c.begin[:depth], []).append(part)
        return {
            index: DcpSource.of(name, DcpTensor(tensor.dtype, shape, tuple(parts[index])))
            for index in indices
        }
    whole, each = DcpSource.of(name, tensor), math.prod(shape)
    spec = TensorSpec(name, whole.spec.dtype, shape)
    return {index: TensorSection(whole, number * each, spec) for number, index in enumerate(indices)}


@dataclass(frozen=True)
class ChecksummedTensor:
    """A tensor all of whose values are compared with their checksums before the first is given.

    A `TensorSource`. For tensors that are read in parts out of order, or not to the end.
    """

    source: TensorSource
    _done: list[bool] = field(default_factory=list[bool], compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def spec(self) -> TensorSpec:
        return self.source.spec

    def fill(self, first: int, into: torch.Tensor) -> None:
        """See `TensorSource.fill`.

        Raises:
            Damaged: a value differs from its checksum.
        """
        with self._lock:
            if not self._done:
                for _ in pieces_of(self.source):
                    pass
                self._done.append(True)
        self.source.fill(first, into)
