"""Finds the bytes of tensors that `torch.save` wrote, and reads plain values, without running pickles.

`torch.save` writes a ZIP archive whose entries are stored as they are: `data.pkl` describes the value, and
`data/<key>` are the tensors' bytes. A tensor can so be read in parts.
"""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import io
import math
import os
import zipfile
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cairn.checkpoint.manifest import Damaged
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle, load, ordered_dict

MAX_READ_BYTES = 64 << 20
"""Limit of what is read at once of an archive beside tensors: its directory, and `data.pkl`."""
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
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): ordered_dict,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_PLAIN = {("collections", "OrderedDict"): ordered_dict}
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


@dataclass(frozen=True)
class Values:
    """The bytes of a tensor in a file.

    offset: of the storage, in the file. count: values in the storage. first, strides: the tensor in it, as
    for `torch.as_strided`. crc: CRC-32 of the storage's bytes; 0 if the writer did not compute it.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    count: int
    first: int
    strides: tuple[int, ...]
    crc: int


@dataclass(frozen=True)
class TensorInFile:
    """A tensor whose values stay in the file."""

    values: Values
    shape: tuple[int, ...]


def locate(stream: Stream, dtype: torch.dtype, shape: tuple[int, ...]) -> Values:
    """Where the bytes of the tensor in `stream` are; it must have this data type and shape.

    Raises:
        Refused: the stream names what is not allowed, or is compressed.
        Damaged: the stream holds anything else.
    """
    found = read_object(stream)
    if not isinstance(found, TensorInFile):
        raise Damaged(f"{stream.path} at byte {stream.offset} holds no tensor")
    if found.values.dtype != dtype or found.shape != shape:
        raise Damaged(
            f"{stream.path} at byte {stream.offset} holds a tensor of {found.values.dtype} "
            f"{list(found.shape)}, not {dtype} {list(shape)}"
        )
    return found.values


def read_object(stream: Stream, allowed: Mapping[tuple[str, str], Any] = MappingProxyType({})) -> Any:
    """The value in `stream`, whose tensors are `TensorInFile`.

    Args:
        allowed: what stands for further names that the pickle may name; see `safe_pickle.load`.

    Raises:
        Refused: the stream names what is not allowed, or is compressed.
        Damaged: the stream is no whole archive, or holds invalid tensors.
    """
    with _Archive(stream) as archive:

        def rebuild(*arguments: object) -> TensorInFile:
            return _tensor(archive, arguments)

        try:
            own: dict[tuple[str, str], Any] = {_REBUILD: rebuild}
            names = ChainMap(own, allowed, _ALLOWED)  # pyright: ignore[reportArgumentType] # is only read
            return load(archive.pickle(), names, lambda pid: pid)
        except ForbiddenPickle as error:
            raise ForbiddenPickle(f"{archive.where}: {error}") from None


def _tensor(archive: "_Archive", arguments: tuple[Any, ...]) -> TensorInFile:
    """Where the values of a tensor in an archive are.

    Args:
        arguments: those of torch's function that makes the tensor.

    Raises:
        Damaged: the tensor is not in the archive.
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
    return TensorInFile(Values(archive.path, offset, dtype, count, first, steps, crc), shape)


def read_value(stream: Stream) -> Any:
    """The value in `stream`: numbers, strings, None, and lists, tuples and dictionaries of such.

    Raises:
        Refused: the value is anything else.
        Damaged: the stream is no whole archive.
    """
    with _Archive(stream) as archive:
        return load(archive.pickle(), _PLAIN)


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
        """Close the file."""
        if not self.closed:
            os.close(self._fd)
        super().close()

    def seekable(self) -> bool:
        """True."""
        return True

    def readable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in the range."""
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
