"""Writes files of `torch.save` while their tensors are read: a few pieces of one are in memory at a time."""

# torch is typed in part, and the values that are pickled have any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2  # pyright: ignore # the name that every such file has

from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.reader import as_memory
from cairn.checkpoint.tensors.stream_writer import pieces_of
from cairn.formats.common.match_layout import Outgoing
from cairn.formats.torch_file.torch_stream import LOCAL_HEADER_BYTES, STORAGES
from cairn.run.files import naming

ALIGNMENT = 64
"""Values begin at multiples of this in the file, as torch has it, so that the file can be mapped."""
ZIP64_BYTES = 1 << 30
"""Larger entries have the ZIP64 field, which is 20 bytes long, in their local header."""
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}


def save(path: Path, value: Any, on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Write what `torch.load(path, weights_only=True)` reads as `value`, with tensors for its `Outgoing`s.

    The file is not fsynced.

    Args:
        value: numbers, strings, None, and lists, tuples and dictionaries of such and of `Outgoing`; the same
            object twice shares its values.
        on_bytes: called with the number of bytes of tensors written since the last call.

    Raises:
        Damaged: a source is invalid.
        OSError: the file can't be written.
    """
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(value)
    with naming(path), open(path, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", described.getvalue()), ("byteorder", b"little")):
            with archive.open(_entry(name), "w") as entry:
                entry.write(data)
        for number, tensor in enumerate(pickler.found):
            info = _entry(f"data/{number}")
            large = tensor.source.spec.nbytes > ZIP64_BYTES
            begin = out.tell() + LOCAL_HEADER_BYTES + len(info.filename) + (20 if large else 0)
            padding = -(begin + 4) % ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
            with archive.open(info, "w", force_zip64=large) as entry:
                for piece in pieces_of(tensor.source):
                    data = as_memory(piece)
                    entry.write(data)
                    on_bytes(len(data))
        with archive.open(_entry("version"), "w") as entry:
            entry.write(b"3\n")


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry of the archive; equal content makes equal files."""
    return zipfile.ZipInfo(f"archive/{name}")


@dataclass(frozen=True)
class _Storage:
    """The values of a tensor: in the pickle, a reference to an entry of the archive."""

    key: str
    kind: Any
    count: int


class _Pickler(pickle.Pickler):
    """Describes tensors as torch does, and lists them in the order of their entries."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=2)
        self.found: list[Outgoing] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Outgoing):
            return NotImplemented
        spec: TensorSpec = obj.source.spec
        kind = getattr(torch, _STORAGE_NAMES[obj.dtype])
        storage = _Storage(str(len(self.found)), kind, torch.Size(spec.shape).numel())
        self.found.append(obj)
        hooks: OrderedDict[str, Any] = OrderedDict()  # of the backward pass: none
        return _rebuild_tensor_v2, (storage, 0, spec.shape, obj.blank.stride(), False, hooks)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.count)
        return None
