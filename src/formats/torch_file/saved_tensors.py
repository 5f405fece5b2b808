"""Tensors in files of `torch.save` as sources, whose checksums are compared before they are read in parts."""

import math
import threading
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from cairn.checkpoint.checksums import ZIP_CRC32
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.dtypes import DTYPE_NAMES
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.reader import ReadRange, as_memory, read_pieces
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle
from cairn.formats.torch_file.torch_stream import Size, Stream, TensorInFile, Values, read_object

CHECKED_BYTES = 16 << 20
"""Bytes that are read at once to compute a checksum."""
Allowed = Mapping[tuple[str, str], Any]
NOTHING_MORE: Allowed = MappingProxyType({})


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file; a `Source`.

    The CRC-32 that torch wrote of its storage is compared before the first value is given out.
    """

    spec: TensorSpec
    values: Values
    _checked: list[bool] = field(default_factory=list[bool], repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, found: object) -> "SavedTensor":
        """What a file holds, under a name.

        Raises:
            Damaged: it is no tensor, or one of a type that can't be stored.
        """
        if not isinstance(found, TensorInFile):
            raise Damaged(f"{name} is no tensor")
        if found.values.dtype not in DTYPE_NAMES:
            raise Damaged(f"{found.values.path}: {name} is of {found.values.dtype}, which can't be stored")
        return cls(TensorSpec(name, DTYPE_NAMES[found.values.dtype], tuple(found.shape)), found.values)

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.spec.shape)

    def fill(self, first: int, into: torch.Tensor) -> None:
        """Read consecutive values; see `content.Source`.

        Raises:
            Damaged: the values don't follow each other in the file, or differ from their checksum.
        """
        values, shape = self.values, self.spec.shape
        row_major = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        if any(n > 1 and a != b for n, a, b in zip(shape, values.strides, row_major, strict=True)):
            raise Damaged(f"{values.path}: the values of {self.spec.name} lie apart from each other")
        with self._lock:
            if not self._checked:
                self._check()
                self._checked.append(True)
        offset = values.offset + (values.first + first) * values.dtype.itemsize
        read_pieces([ReadRange(values.path, offset, values.dtype, into, counted=False)])

    def _check(self) -> None:
        """Compare the storage with its checksum, if it has one."""
        if not self.values.crc:
            return
        path, nbytes, crc = self.values.path, self.values.count * self.values.dtype.itemsize, 0
        for first in range(0, nbytes, CHECKED_BYTES):
            data = torch.empty(min(CHECKED_BYTES, nbytes - first), dtype=torch.uint8)
            read_pieces([ReadRange(path, self.values.offset + first, data.dtype, data, counted=False)])
            crc = ZIP_CRC32.of(as_memory(data), crc)
        if crc != self.values.crc:
            raise Damaged(f"{path}: {self.spec.name} differs from its checksum (CRC-32)")


def read_file(path: Path, allowed: Allowed = NOTHING_MORE) -> Any:
    """The value in a file of `torch.save`, whose tensors are `TensorInFile`.

    Args:
        allowed: what stands for each (module, name) that the file may name beside what every such file does.

    Raises:
        FileNotFoundError: there is no such file.
        Refused: the file names what is not allowed.
        Damaged: the file is invalid.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    return read_stream(Stream(path, 0, path.stat().st_size), allowed)


def read_stream(stream: Stream, allowed: Allowed = NOTHING_MORE) -> Any:
    """The value that `torch.save` wrote into a part of a file; see `read_file`.

    Raises:
        Refused: the stream names what is not allowed.
        Damaged: the stream is invalid.
    """
    own: dict[tuple[str, str], Any] = {}
    names = ChainMap(own, allowed, _USUAL)  # pyright: ignore[reportArgumentType] # is only read
    return read_object(stream, names)


def _parameter(tensor: object, *_: object) -> object:
    """Stands for the function that makes a parameter."""
    return tensor


def _typed(rebuild: object, kind: object, arguments: object, *_: object) -> TensorInFile:
    """Stands for the function that makes a tensor with attributes, which are dropped."""
    made = None
    if callable(rebuild) and kind == _TENSOR and isinstance(arguments, tuple):
        made = rebuild(*cast("tuple[object, ...]", arguments))  # what stands for a function: all are safe
    if not isinstance(made, TensorInFile):
        raise ForbiddenPickle("a tensor of a class of its own is made")
    return made


_TENSOR = "a tensor"
_USUAL: Allowed = {
    ("torch", "Size"): Size,
    ("torch", "Tensor"): _TENSOR,
    ("torch.nn.parameter", "Parameter"): _TENSOR,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPE_NAMES},
}
