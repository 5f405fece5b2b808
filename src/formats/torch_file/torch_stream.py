"""Reads what `torch.save` wrote, in a file or in a part of one, without running pickles.

`torch.save` writes a ZIP archive whose entries are stored as they are: `data.pkl` describes the value, and
`data/<key>` are the tensors' bytes. A tensor can so stay in the file, and be read in parts.
"""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import io
import math
import os
import threading
import zipfile
from collections import ChainMap
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cairn.checkpoint.checksums import ZIP_CRC32, SpanSum
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.reader import DTYPE_NAMES, ReadRange, as_memory, read_pieces
from cairn.checkpoint.tensors.source import whole_storage
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle, load, ordered_dict

MAX_READ_BYTES = 64 << 20
"""Limit of what is read at once of an archive beside tensors: its directory, and `data.pkl`."""
CHECKED_BYTES = 16 << 20
"""Bytes that are read at once to compute a checksum."""
LOCAL_HEADER_BYTES = 30
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
MAX_DIMENSIONS = 64
MAX_VALUES = 1 << 50


class Size(tuple[int, ...]):
    """Stands for torch.Size."""

    __slots__ = ()

    def __new__(cls, lengths: object = ()) -> "Size":
        if not isinstance(lengths, (tuple, list)) or len(lengths) > MAX_DIMENSIONS:
            raise ForbiddenPickle("a shape has too many dimensions")
        if any(type(n) is not int or not 0 <= n <= MAX_VALUES for n in lengths):
            raise ForbiddenPickle(f"a shape or an offset is not made of whole numbers from 0 to {MAX_VALUES}")
        return super().__new__(cls, lengths)


@dataclass(frozen=True)
class Stream:
    """A range of a file that holds one value as `torch.save` writes it."""

    path: Path
    offset: int
    length: int


@dataclass(eq=False)
class SavedTensor:
    """A tensor in a file, whose values are read when they are asked for; a `TensorSource` under its name.

    offset: of the tensor's storage, in the file. count: values in the storage. first, strides: the tensor in
    it, as for `torch.as_strided`. crc: CRC-32 of the storage's bytes; 0 if the writer did not compute it.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    count: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    crc: int
    name: str = ""
    _checked: bool = field(default=False, init=False)
    _sum: SpanSum | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @staticmethod
    def of(name: str, found: object) -> "SavedTensor":
        """What a file holds, under a name.

        Raises:
            Damaged: it is no tensor, or one of a type that can't be stored.
        """
        if not isinstance(found, SavedTensor):
            raise Damaged(f"{name} is no tensor")
        if found.dtype not in DTYPE_NAMES:
            raise Damaged(f"{found.path}: {name} is of {found.dtype}, which can't be stored")
        return replace(found, name=name)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, DTYPE_NAMES[self.dtype], self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def in_order(self) -> bool:
        """Whether the values follow each other in the file, unlike those of a tensor saved transposed."""
        row_major = (math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        steps = zip(self.shape, self.strides, row_major, strict=True)
        return not self.size or all(n == 1 or step == wanted for n, step, wanted in steps)

    def fill(self, first: int, into: torch.Tensor) -> None:
        """Read values; the checksum of the storage is compared before the first one is given out.

        Raises:
            Damaged: the file ends too early, or the values differ from their checksum.
        """
        with self._lock:
            if not self._checked:
                self._check()
                self._checked = True
        if self.in_order:
            self._read(self.first + first, into)
            return
        inner = math.prod(self.shape[1:])
        low, high = first // inner, -(-(first + len(into)) // inner)
        with self.rows(low, high, taken=len(into)) as rows:
            into.copy_(rows.reshape(-1)[first - low * inner :][: len(into)])

    def fill_and_check(self, first: int, into: torch.Tensor) -> None:
        """Read values that follow each other in the file, and add them to the checksum of what was read.

        It is compared once all values of the storage have been read, and whenever they are read at once: for
        tensors that are read once, from their beginning to their end.

        Raises:
            Damaged: the file ends too early, or the values differ from their checksum.
        """
        self._read(self.first + first, into)
        if not self.crc:
            return
        if into.numel() == self.count:  # perhaps not for the first time
            found = ZIP_CRC32.of(as_memory(into), 0)
        else:
            with self._lock:
                so_far = self._sum = self._sum or SpanSum(self.count * self.dtype.itemsize, ZIP_CRC32)
            found = so_far.add((self.first + first) * self.dtype.itemsize, as_memory(into))
        if found not in (None, self.crc):
            raise Damaged(f"{self.path}: {self.name} differs from its checksum (CRC-32)")

    @contextmanager
    def rows(self, low: int, high: int, *, taken: int) -> Generator[torch.Tensor]:
        """The rows from `low` to `high` of a tensor of one dimension or more, checked as by `fill_and_check`.

        The storage of values in another order is read whole, and kept until all of them were taken.

        Args:
            taken: how many values of the rows are used.
        """
        if self.in_order:
            inner = math.prod(self.shape[1:])
            values = torch.empty((high - low) * inner, dtype=self.dtype)
            self.fill_and_check(low * inner, values)
            yield values.view(high - low, *self.shape[1:])
            return
        with whole_storage(self, self._reach, taken=taken, of=self.size) as storage:
            yield storage.as_strided(self.shape, self.strides)[low:high]

    def _reach(self) -> torch.Tensor:
        """All values of the storage from the tensor's first one to its last."""
        reach = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        storage = torch.empty(reach, dtype=self.dtype)
        self.fill_and_check(0, storage)
        return storage

    def _read(self, item: int, into: torch.Tensor) -> None:
        """Read values of the storage, beginning with `item`."""
        offset = self.offset + item * self.dtype.itemsize
        read_pieces([ReadRange(self.path, offset, self.dtype, into, counted=False)])

    def _check(self) -> None:
        """Compare the storage with its checksum, if it has one."""
        if not self.crc:
            return
        nbytes, crc = self.count * self.dtype.itemsize, 0
        for first in range(0, nbytes, CHECKED_BYTES):
            data = torch.empty(min(CHECKED_BYTES, nbytes - first), dtype=torch.uint8)
            read_pieces([ReadRange(self.path, self.offset + first, data.dtype, data, counted=False)])
            crc = ZIP_CRC32.of(as_memory(data), crc)
        if crc != self.crc:
            raise Damaged(f"{self.path}: {self.name} differs from its checksum (CRC-32)")


Allowed = Mapping[tuple[str, str], Any]
NOTHING_MORE: Allowed = MappingProxyType({})


def _parameter(tensor: object, *_: object) -> object:
    """Stands for the function that makes a parameter."""
    return tensor


def _typed(rebuild: object, kind: object, arguments: object, *_: object) -> SavedTensor:
    """Stands for the function that makes a tensor with attributes, which are dropped."""
    made = None
    if callable(rebuild) and kind == _TENSOR and isinstance(arguments, tuple):
        made = rebuild(*arguments)  # what stands for a function: all are safe
    if not isinstance(made, SavedTensor):
        raise ForbiddenPickle("a tensor of a class of its own is made")
    return made


_TENSOR = "a tensor"
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_PLAIN: Allowed = {("collections", "OrderedDict"): ordered_dict}
_USUAL: Allowed = {
    **_PLAIN,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPE_NAMES},
    ("torch", "Size"): Size,
    ("torch", "Tensor"): _TENSOR,
    ("torch.nn.parameter", "Parameter"): _TENSOR,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
}
"""What files of `torch.save` name for tensors, and what stands for it."""


def read_file(path: Path, allowed: Allowed = NOTHING_MORE) -> Any:
    """The value in a file of `torch.save`; see `read_stream`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    return read_stream(Stream(path, 0, path.stat().st_size), allowed)


def read_stream(stream: Stream, allowed: Allowed = NOTHING_MORE) -> Any:
    """The value that `torch.save` wrote into a part of a file; tensors are `SavedTensor`s without a name.

    Args:
        allowed: what stands for each (module, name) that the pickle may name beside what every such file
            does, or in its place; see `safe_pickle.load`.

    Raises:
        ForbiddenPickle: the stream names what is not allowed, or is compressed.
        Damaged: the stream is no whole archive, or holds invalid tensors.
    """
    with _Archive(stream) as archive:

        def rebuild(*arguments: object) -> SavedTensor:
            return _tensor(archive, arguments)

        try:
            own: dict[tuple[str, str], Any] = {_REBUILD: rebuild}
            names = ChainMap(own, allowed, _USUAL)  # pyright: ignore[reportArgumentType] # is only read
            return load(archive.pickle(), names, lambda pid: pid)
        except ForbiddenPickle as error:
            raise ForbiddenPickle(f"{archive.where}: {error}") from None


def read_value(stream: Stream) -> Any:
    """The value in `stream`: numbers, strings, None, and lists, tuples and dictionaries of such.

    Raises:
        ForbiddenPickle: the value is anything else.
        Damaged: the stream is no whole archive.
    """
    with _Archive(stream) as archive:
        return load(archive.pickle(), _PLAIN)


def locate(name: str, stream: Stream, dtype: torch.dtype, shape: tuple[int, ...]) -> SavedTensor:
    """The tensor in `stream`, under a name; it must have this data type and shape.

    Raises:
        ForbiddenPickle: the stream names what is not allowed, or is compressed.
        Damaged: the stream holds anything else.
    """
    found = read_stream(stream)
    if not isinstance(found, SavedTensor):
        raise Damaged(f"{stream.path} at byte {stream.offset} holds no tensor")
    if found.dtype != dtype or found.shape != shape:
        raise Damaged(
            f"{stream.path} at byte {stream.offset} holds a tensor of {found.dtype} {list(found.shape)}, not "
            f"{dtype} {list(shape)}"
        )
    return replace(found, name=name)


def _tensor(archive: "_Archive", arguments: tuple[Any, ...]) -> SavedTensor:
    """Where the values of a tensor in an archive are.

    Args:
        arguments: those of torch's function that makes the tensor.
    """
    if len(arguments) < 4:
        raise Damaged(f"{archive.where} holds no tensor")
    storage, first, size, strides = arguments[:4]
    if not isinstance(storage, tuple) or len(storage) != 5 or storage[0] != "storage":
        raise Damaged(f"{archive.where} holds a tensor without values")
    _, dtype, key, _, count = storage
    shape, steps = _numbers(size), _numbers(strides)
    if any(type(n) is not int or n < 0 for n in (first, count, *shape, *steps)) or len(steps) != len(shape):
        raise Damaged(f"{archive.where} holds a tensor with invalid numbers")
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"{archive.where} holds a tensor of an unknown data type")
    last = first + sum((n - 1) * stride for n, stride in zip(shape, steps, strict=True))
    if math.prod(shape) and last >= count:
        raise Damaged(f"{archive.where}: a tensor reaches beyond its storage")
    if math.prod(shape) > count:
        raise Damaged(f"{archive.where} holds a tensor of {list(shape)}, and {count} values for it")
    offset, crc = archive.storage(str(key), count * dtype.itemsize)
    return SavedTensor(archive.path, offset, dtype, count, first, shape, steps, crc)


def _numbers(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (None,)


class _Archive:
    """The ZIP archive in a stream; a context manager."""

    def __init__(self, stream: Stream):
        self.path = stream.path
        self.where = f"{stream.path} at byte {stream.offset}"
        self._stream = stream
        self._window = _Window(stream)
        try:
            self._zip = zipfile.ZipFile(self._window)  # pyright: ignore[reportArgumentType] # a file object
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            self._window.close()
            raise Damaged(f"{self.where}: not written by torch.save: {error}") from None
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            name = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ForbiddenPickle(f"{self.where}: {name} is compressed")
            if name in self._entries:
                raise Damaged(f"{self.where}: has two entries {name}")
            self._entries[name] = entry
        if "byteorder" in self._entries and self._content("byteorder") != b"little":
            raise ForbiddenPickle(f"{self.where}: the values are not little-endian")

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._window.close()

    def pickle(self) -> bytes:
        """What describes the value."""
        return self._content("data.pkl")

    def storage(self, key: str, nbytes: int) -> tuple[int, int]:
        """Offset in the file, and CRC-32, of the values with a key."""
        start, size, crc = self._find(f"data/{key}")
        if size != nbytes:
            raise Damaged(f"{self.where}: data/{key} has {size} bytes, not {nbytes}")
        return self._stream.offset + start, crc

    def _content(self, name: str) -> bytes:
        start, size, _ = self._find(name)
        return self._window.at(start, size)

    def _find(self, name: str) -> tuple[int, int, int]:
        """First byte in the stream, size and CRC-32 of an entry."""
        if name not in self._entries:
            raise Damaged(f"{self.where}: has no {name}")
        entry = self._entries[name]
        header = self._window.at(entry.header_offset, LOCAL_HEADER_BYTES)
        if header[:4] != b"PK\3\4":
            raise Damaged(f"{self.where}: {name} does not begin where the archive says")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + LOCAL_HEADER_BYTES + lengths
        if start + entry.file_size > self._stream.length:
            raise Damaged(f"{self.where}: {name} reaches beyond its stream")
        return start, entry.file_size, entry.CRC


class _Window(io.RawIOBase):
    """A stream's range of its file, as a file of its own."""

    def __init__(self, stream: Stream):
        super().__init__()
        self._stream = stream
        self._fd = os.open(stream.path, os.O_RDONLY)
        self._position = 0

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a position in the range.

        Raises:
            OSError: it is before the first byte.
        """
        base = (0, self._position, self._stream.length)[whence]
        if base + offset < 0:
            raise OSError("a position before the archive's first byte")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes.

        Raises:
            Damaged: they are more than the directory of any archive here has.
        """
        left = max(self._stream.length - self._position, 0)
        data = self.at(self._position, left if size < 0 else min(size, left))
        self._position += len(data)
        return data

    def at(self, start: int, size: int) -> bytes:
        """The bytes from `start` on."""
        where = f"{self._stream.path} at byte {self._stream.offset}"
        if size > MAX_READ_BYTES:
            raise ForbiddenPickle(
                f"{where}: asks for {size} bytes beside tensors; at most {MAX_READ_BYTES} are read"
            )
        if start < 0 or start + size > self._stream.length:
            raise Damaged(f"{where}: the archive reaches beyond its stream")
        return os.pread(self._fd, size, self._stream.offset + start)
