"""Notes the bytes of tensors on their way into files, and compares what is read back of these files.

A tensor's note is the CRC of its bytes as they are to be in the result. So the source is read once: the
result is read from the disk, by the reader of its format, and compared with the notes.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from cairn.checkpoint.checksums import SpanSum
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.reader import DTYPE_NAMES, as_memory
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import THREADS, Memory, in_order

SERIAL_VALUES = 1 << 15
"""Values that torch converts on the thread that asks for it: more would be divided among threads, which here
are busy with reading and writing."""
CONVERTED_VALUES = 1 << 19
"""Values of a tensor that are read, and then converted while they are in the processor's cache."""
STEP_BYTES = 8 << 20
"""Bytes of a tensor that are read back at a time."""
Dtypes = Mapping[str, torch.dtype]
AS_THEY_ARE: Dtypes = MappingProxyType({})


class _Own(threading.local):
    """A thread's own room for values that it converts."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for up to CONVERTED_VALUES values."""
        if self._memory is None:
            self._memory = torch.empty(CONVERTED_VALUES, dtype=torch.float64)
        return self._memory.view(dtype)[:count]


_own = _Own()


@dataclass(frozen=True, eq=False)
class VerifiedTensor:
    """A tensor that is converted to the data type that `spec` names, and noted; a `TensorSource`."""

    source: TensorSource
    spec: TensorSpec
    note: SpanSum

    def fill(self, first: int, into: torch.Tensor) -> None:
        """See `TensorSource.fill`. What is read again is not noted again."""
        original = dtype_of(self.source)
        if into.dtype == original:
            self.source.fill(first, into)
        else:
            for begin in range(0, len(into), CONVERTED_VALUES):
                part = into[begin : begin + CONVERTED_VALUES]
                values = _own.room(len(part), original)
                self.source.fill(first + begin, values)
                _convert(values, part)
        self.note.add(first * into.element_size(), as_memory(into))

    @property
    def was_read(self) -> bool:
        """Whether any byte was asked for."""
        return self.note.gaps() != SpanSum(self.note.nbytes).gaps()

    def finish(self) -> int:
        """The CRC of all bytes; those that were never asked for are read now.

        Raises:
            Damaged: the source is invalid.
        """
        dtype = dtype_of(self)
        for low, high in self.note.gaps():
            for first in range(low, high, STEP_BYTES):
                count = (min(first + STEP_BYTES, high) - first) // dtype.itemsize
                self.fill(first // dtype.itemsize, torch.empty(count, dtype=dtype))
        crc = self.note.value()
        assert crc is not None
        return crc


def noted(sources: Mapping[str, TensorSource], dtypes: Dtypes = AS_THEY_ARE) -> dict[str, VerifiedTensor]:
    """The same tensors; what is read of them is converted and noted.

    Args:
        dtypes: the data types of those tensors that are not written as they are, by name.
    """
    found: dict[str, VerifiedTensor] = {}
    for name, source in sources.items():
        dtype = DTYPE_NAMES[dtypes.get(name, dtype_of(source))]
        spec = replace(source.spec, dtype=dtype)
        found[name] = VerifiedTensor(source, spec, SpanSum(spec.nbytes))
    return found


def check_noted(
    written: Mapping[str, TensorSource],
    expected: Mapping[str, VerifiedTensor],
    where: Path,
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Read every value of what was written, and compare each tensor with its note.

    Args:
        where: names what was written in errors.
        on_bytes: called with the number of bytes read since the last call.

    Raises:
        Damaged: a tensor is missing, or differs.
    """
    if missing := sorted(expected.keys() - written.keys()):
        raise Damaged(f"{where}: reading back found no {', '.join(missing)}")
    for name, source in expected.items():
        found = written[name].spec
        if (found.shape, found.dtype) != (source.spec.shape, source.spec.dtype):
            raise Damaged(f"{where}: {name} has another shape or data type than was written")
    sums = {name: SpanSum(source.spec.nbytes) for name, source in expected.items()}
    memory = Memory(STEP_BYTES)

    def read(step: tuple[str, int, int]) -> int:
        name, first, count = step
        dtype = dtype_of(written[name])
        values = memory.mine()[: count * dtype.itemsize].view(dtype)
        written[name].fill(first, values)
        sums[name].add(first * dtype.itemsize, as_memory(values))
        return values.nbytes

    with ThreadPoolExecutor(THREADS) as pool:
        for count in in_order(pool, read, _steps(expected)):
            on_bytes(count)
    for name, source in expected.items():
        if sums[name].value() != source.finish():
            raise Damaged(f"{where}: {name} differs from what was written")


def _steps(sources: Mapping[str, TensorSource]) -> Iterator[tuple[str, int, int]]:
    """Pieces of all tensors, in order: the name, the first value, and the number of values."""
    for name, source in sources.items():
        count, each = torch.Size(source.spec.shape).numel(), STEP_BYTES // dtype_of(source).itemsize
        for first in range(0, count, each):
            yield name, first, min(each, count - first)


def _convert(values: torch.Tensor, into: torch.Tensor) -> None:
    """Put values into a tensor of another data type, on this thread alone."""
    for first in range(0, len(into), SERIAL_VALUES):
        into[first : first + SERIAL_VALUES].copy_(values[first : first + SERIAL_VALUES])
