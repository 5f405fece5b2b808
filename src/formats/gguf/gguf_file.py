"""Reads GGUF files: metadata and where the tensors lie.

gguf's own reader believes the numbers in a file: a wrong length keeps it in a loop for ever. Here each number
is checked against the bytes that are left, and metadata beyond MAX_METADATA_BYTES is refused.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.layout import StoredTensor, TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import needed

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA_BYTES = 256 << 20
"""Of keys, values and names of tensors. Those of a vocabulary of 262,144 tokens take 20 MB."""
MAX_ITEMS = 1 << 22
"""Values in arrays of metadata, all together: each takes more memory than in the file."""
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
ALIGNMENT = 32
"""Of tensors in the file, where `general.alignment` does not say otherwise."""
BLOCK = 32
"""Values in a block of Q8_0."""
BLOCK_BYTES = 2 + BLOCK
"""Bytes of such a block: the scale in float16, and the values as int8."""

PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
"""Types of tensors that are values as they are: safetensors' names by GGUF's numbers."""
Q8_0 = 8
"""The type of quantised tensors that is read without the package gguf."""
AT_ONCE = 1 << 19
"""Values that are dequantised or quantised at a time: gguf makes several copies of them. A multiple of the
values in a block of any type."""
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of numbers in `struct`, by GGUF's types of values."""


@dataclass(frozen=True)
class GgufFile:
    """What the header of a file says. values: the metadata by key. tensors: by the names in the file."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorSource]


@dataclass(frozen=True)
class Quantization:
    """A type of tensors in blocks. number: GGUF's of the type. values, nbytes: of a block."""

    number: int
    values: int
    nbytes: int

    def decode(self, blocks: "torch.Tensor") -> "torch.Tensor":
        """The values of blocks, uint8 [blocks * nbytes]; float32 [blocks * values]."""
        import torch

        if self.number == Q8_0:
            rows = blocks.view(-1, self.nbytes)
            scales = rows[:, :2].contiguous().view(torch.float16).float()
            return (scales * rows[:, 2:].view(torch.int8)).view(-1)
        gguf = needed("gguf", "formats")
        kind = gguf.GGMLQuantizationType(self.number)
        values: torch.Tensor = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))  # pyright: ignore
        return values


def quantization_of(number: int) -> Quantization | str:
    """The type of tensors with GGUF's number, or the name of a type that is not read.

    Raises:
        UsageError: the package gguf is needed to tell, and is not installed.
    """
    import torch

    if number == Q8_0:
        return Quantization(Q8_0, BLOCK, BLOCK_BYTES)
    gguf = needed("gguf", "formats")
    try:
        kind = gguf.GGMLQuantizationType(number)
        found = Quantization(number, *gguf.GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        return f"type {number}"
    try:
        found.decode(torch.zeros(found.nbytes, dtype=torch.uint8))
    except NotImplementedError:
        return str(kind.name)
    return found


@dataclass(frozen=True)
class Quantized:
    """A tensor in blocks of a quantisation, as float32; a `TensorSource`. blocks: its bytes."""

    kind: Quantization
    blocks: TensorSource
    spec: TensorSpec

    def fill(self, first: int, into: "torch.Tensor") -> None:
        import torch

        done = 0
        while done < len(into):
            block, skipped = divmod(first + done, self.kind.values)
            count = min(len(into) - done, AT_ONCE - skipped)
            raw = torch.empty(-(-(skipped + count) // self.kind.values) * self.kind.nbytes, dtype=torch.uint8)
            self.blocks.fill(block * self.kind.nbytes, raw)
            into[done : done + count] = self.kind.decode(raw)[skipped : skipped + count]
            done += count


def read_gguf(path: Path) -> GgufFile:
    """What the header of the file says; the values of tensors stay in the file.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: the file is invalid, or ends too early.
        CheckpointError: tensors are in quantisations that are not read; the message names these.
        UsageError: there are tensors in other quantisations than Q8_0, and the package gguf is not installed.
    """
    size = path.stat().st_size
    if size < 24:
        raise Damaged(f"{path}: not a GGUF file: it has {size} bytes")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        cursor = _Cursor(mapped, path, min(size, MAX_METADATA_BYTES))
        if cursor.take(4) != MAGIC:
            raise Damaged(f"{path}: not a GGUF file")
        version = cursor.number("I")
        if version not in VERSIONS:
            reason = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise Damaged(f"{path}: a GGUF file that is {reason} can't be read")
        tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
        if max(tensor_count, value_count) > MAX_TENSORS:
            raise Damaged(
                f"{path}: has {tensor_count} tensors and {value_count} values; {MAX_TENSORS} are read"
            )
        values: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.text()
            if key in values:
                raise Damaged(f"{path}: has {key} twice")
            values[key] = cursor.value(cursor.number("I"))
        if values.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path}: is one of several files; join them with llama-gguf-split --merge")
        entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = values.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise Damaged(f"{path}: general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    return GgufFile(path, values, _tensors(path, entries, start, size))


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """Reads the header from its beginning; nothing after `end` belongs to it."""

    def __init__(self, data: mmap.mmap, path: Path, end: int):
        self._data = data
        self._path = path
        self._end = end
        self._items = 0
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next bytes.

        Raises:
            Damaged: there are fewer.
        """
        if count > self._end - self.position:
            raise Damaged(f"{self._path}: the header would be longer than the file, or than 256 MB")
        self.position += count
        return self._data[self.position - count : self.position]

    def number(self, kind: str) -> Any:
        """The next number; `kind` is its format in `struct`."""
        (number,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))
        return number

    def text(self) -> str:
        """The next string.

        Raises:
            Damaged: it is not UTF-8, or longer than the header.
        """
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise Damaged(f"{self._path}: a string in the header is not UTF-8: {error}") from None

    def value(self, kind: int) -> Any:
        """The next value of metadata; an array is a list.

        Raises:
            Damaged: it has an unknown type, or is longer than the header.
        """
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise Damaged(f"{self._path}: metadata of the unknown type {kind}")
        item, count = self.number("I"), self.number("Q")
        self._items += count
        if self._items > MAX_ITEMS:
            raise Damaged(f"{self._path}: has arrays of more than {MAX_ITEMS} values in its metadata")
        if item == STRING:
            return [self.text() for _ in range(count)]
        if item not in NUMBERS:
            raise Damaged(f"{self._path}: metadata with an array of the unknown type {item}")
        data = self.take(count * struct.calcsize("<" + NUMBERS[item]))
        return list(struct.unpack(f"<{count}{NUMBERS[item]}", data))


def _entry(cursor: _Cursor) -> _Entry:
    """The next entry of the table of tensors; its dimensions are in torch's order."""
    name = cursor.text()
    count = cursor.number("I")
    if count > MAX_DIMENSIONS:
        raise Damaged(f"{name} has {count} dimensions")
    shape = tuple(reversed([int(cursor.number("Q")) for _ in range(count)]))
    return _Entry(name, shape, cursor.number("I"), cursor.number("Q"))


def _tensors(path: Path, entries: list[_Entry], start: int, size: int) -> dict[str, TensorSource]:
    """Where the tensors lie."""
    kinds = {number: quantization_of(number) for number in {entry.kind for entry in entries} - PLAIN.keys()}
    if refused := [entry.name for entry in entries if isinstance(kinds.get(entry.kind), str)]:
        names = sorted(kind for kind in kinds.values() if isinstance(kind, str))
        raise CheckpointError(
            f"{path}: holds tensors in {', '.join(names)}, which is not read: {listed(refused)}"
        )
    found: dict[str, TensorSource] = {}
    position = start
    for entry in sorted(entries, key=lambda entry: entry.offset):
        kind = kinds.get(entry.kind)
        if isinstance(kind, Quantization):
            if not entry.shape or entry.shape[-1] % kind.values:
                raise Damaged(f"{path}: {entry.name} {list(entry.shape)} can't be in blocks of {kind.values}")
            nbytes = math.prod(entry.shape) // kind.values * kind.nbytes
            blocks = TensorSpec(entry.name, "U8", (nbytes,))
            spec = TensorSpec(entry.name, "F32", entry.shape)
            found_here: TensorSource = Quantized(kind, StoredTensor(path, start + entry.offset, blocks), spec)
        else:
            spec = TensorSpec(entry.name, PLAIN[entry.kind], entry.shape)
            nbytes = spec.nbytes
            found_here = StoredTensor(path, start + entry.offset, spec)
        if start + entry.offset < position or start + entry.offset + nbytes > size:
            raise Damaged(f"{path}: {entry.name} lies outside the file, or in another tensor")
        if entry.name in found:
            raise Damaged(f"{path}: has {entry.name} twice")
        position = start + entry.offset + nbytes
        found[entry.name] = found_here
    return found
