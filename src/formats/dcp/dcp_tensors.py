"""Tensors of a PyTorch distributed checkpoint, read in parts from the chunks that its ranks wrote."""

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from cairn.checkpoint.tensors.dtypes import DTYPE_NAMES
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import pieces_of
from cairn.formats.common.tensor_views import TensorSection
from cairn.formats.dcp.dcp_metadata import Chunk, DcpTensor
from cairn.formats.torch_file.torch_stream import SavedTensor, locate


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
    def of(cls, name: str, tensor: DcpTensor) -> "DcpSource":
        """The tensor, under a name of the caller's choice."""
        return cls(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tensor.shape), tensor)

    @classmethod
    def located(cls, name: str, tensor: DcpTensor, values: dict[Chunk, SavedTensor]) -> "DcpSource":
        """The tensor, where the places of its chunks are known; the streams of the chunks are not used."""
        return cls(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tensor.shape), tensor, values)

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
