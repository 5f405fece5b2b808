"""TensorFlow checkpoints: `model.index` and `model.data-00000-of-00001`, with the hub's names.

The index is a table of LevelDB's form, whose values are protobuf messages. TensorFlow can't be installed
beside vLLM, and the form is small. Each number is checked against the bytes that are there, and each block
and tensor against its CRC-32C.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from awscrt import checksums as crt  # pyright: ignore[reportMissingTypeStubs] # it is typed in its code

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import MALFORMED, StoredTensor, TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import Content, Verification, WriteOptions, folder_of_model
from cairn.formats.huggingface.huggingface import copy_companions
from cairn.run.files import naming

PREFIX = "model"
INDEX = ".index"


class TensorFlow:
    """The files that `tf.raw_ops.SaveV2` and `tf.train.Checkpoint` write; TensorFlow itself isn't needed."""

    stems = (MODEL,)

    def detect(self, source: Path) -> bool:
        return _prefix(source) is not None

    def read(self, source: Path, model: Path | None = None) -> Content:
        prefix = _prefix(source)
        if prefix is None:
            raise FileNotFoundError(2, f"holds no index (*{INDEX}), or several; name one", str(source))
        tensors, left_out = read_index(prefix)
        verify_data(tensors)
        sources = {name: tensor.stored for name, tensor in tensors.items()}
        return Content({MODEL: sources}, model=folder_of_model(model, prefix.parent), left_out=left_out)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        copy_companions(content, folder, options.dtype)
        from cairn.formats.common.verified_reads import KeptValues  # imports torch

        kept = KeptValues(content, options.dtype)
        _write(folder / PREFIX, kept.content.tensors[MODEL], options.on_bytes)
        return kept.read_back(self, folder)


def _prefix(source: Path) -> Path | None:
    """What the names of the files begin with; None if there are no such files, or several."""
    indexes = [source] if source.suffix == INDEX else sorted(source.glob(f"*{INDEX}"))
    prefixes = [index.with_suffix("") for index in indexes if index.is_file()]
    found = [prefix for prefix in prefixes if list(prefix.parent.glob(f"{prefix.name}.data-*-of-*"))]
    return found[0] if len(found) == 1 else None


# Reading

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
TRAILER_BYTES = 5
"""After each block: the kind of compression, and the checksum."""
MAX_INDEX_BYTES = 256 << 20
READ_BYTES = 1 << 20
DTYPES = {
    **{1: "F32", 2: "F64", 3: "I32", 4: "U8", 5: "I16", 6: "I8", 9: "I64", 10: "BOOL", 14: "BF16"},
    **{17: "U16", 19: "F16", 22: "U32", 23: "U64"},
}
"""safetensors' names by TensorFlow's numbers of types."""
STRING = 7
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""Ends the names of variables of `tf.train.Checkpoint`."""
OBJECTS = {"_CHECKPOINTABLE_OBJECT_GRAPH", f"save_counter{VALUE}"}
"""What `tf.train.Checkpoint` adds, and no model needs."""


@dataclass(frozen=True)
class BundleTensor:
    """A tensor in a checkpoint. crc: the masked CRC-32C of its bytes."""

    stored: StoredTensor
    crc: int


def masked(crc: int) -> int:
    """A CRC-32C in the form in which TensorFlow stores it."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes | memoryview, previous: int = 0) -> int:
    """The CRC-32C of `data`, continuing after bytes whose CRC is `previous`."""
    return crt.crc32c(data, previous)  # pyright: ignore[reportArgumentType] # it takes any buffer


def read_index(prefix: Path) -> tuple[dict[str, BundleTensor], tuple[str, ...]]:
    """The tensors by name, and what the checkpoint holds beside them.

    Raises:
        Damaged: the index is invalid, or describes bytes that are not there.
        CheckpointError: tensors are of types that have no counterpart, or parts of others.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise Damaged(f"{path}: has {path.stat().st_size} bytes, more than any index has")
    try:
        entries = dict(_table(path.read_bytes()))
        header = _message(entries.pop(b"", b""))
        shards = _number(header, 1)
        if _number(header, 2) != 0:
            raise ValueError("it is big-endian")
        names = {key.decode(): _message(value) for key, value in entries.items()}
        kinds = {name: _number(entry, 1) for name, entry in names.items()}
        wrong = [n for n, kind in kinds.items() if n not in OBJECTS and (kind not in DTYPES or 7 in names[n])]
        if wrong:
            raise CheckpointError(
                f"{path}: these are parts of tensors, or of types that have no counterpart: {listed(wrong)}"
            )
        found = {
            _plain(n): _tensor(prefix, n, entry, shards) for n, entry in names.items() if n not in OBJECTS
        }
    except (*MALFORMED, IndexError, struct.error) as error:
        raise Damaged(f"{path}: not the index of a TensorFlow checkpoint: {error}") from None
    left_out = tuple(f"{name}: it is not a weight" for name in sorted(OBJECTS & names.keys()))
    return found, left_out


def verify_data(tensors: Mapping[str, BundleTensor]) -> None:
    """Check every tensor's bytes against its checksum.

    Raises:
        Damaged: a tensor has another one, or the file ends too early.
    """
    buffer = bytearray(READ_BYTES)
    for name, tensor in tensors.items():
        stored = tensor.stored
        crc, left = 0, stored.spec.nbytes
        with open(stored.path, "rb", buffering=0) as file:
            file.seek(stored.offset)
            while left and (count := file.readinto(memoryview(buffer)[:left])):
                crc = crc32c(memoryview(buffer)[:count], crc)
                left -= count
        if left or masked(crc) != tensor.crc:
            raise Damaged(f"{stored.path}: {name} does not have the checksum that the index says")


def _tensor(prefix: Path, name: str, entry: Mapping[int, list[int | bytes]], shards: int) -> BundleTensor:
    """Where a tensor lies."""
    shape = tuple(
        _number(_message(dim), 1) for dim in _message(_bytes(entry, 2)).get(2, []) if type(dim) is bytes
    )
    spec = TensorSpec(name, DTYPES[_number(entry, 1)], shape)
    shard, offset, size = (_number(entry, field) for field in (3, 4, 5))
    path = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
    if shard >= shards or not path.is_file():
        raise ValueError(f"{name} is in a file that is not there ({path.name})")
    if any(length >= 1 << 62 for length in shape) or size != spec.nbytes:
        raise ValueError(f"{name} {list(shape)} would have {size} bytes")
    if offset + size > path.stat().st_size:
        raise ValueError(f"{name} ends after the end of {path.name}")
    return BundleTensor(StoredTensor(path, offset, spec), _number(entry, 6))


def _plain(name: str) -> str:
    """The name of a variable: `tf.train.Checkpoint` doubles dots and appends VALUE."""
    return name.removesuffix(VALUE).replace(".S", "/").replace("..", ".") if name.endswith(VALUE) else name


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a table."""
    if len(data) < FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != MAGIC:
        raise ValueError("it does not end as such a table does")
    footer = data[-FOOTER_BYTES:-8]
    position = 0
    handle: list[int] = []
    for _ in range(4):  # of the table's properties, and of the blocks
        number, position = _varint(footer, position)
        handle.append(number)
    list(_block(data, handle[0], handle[1]))  # has nothing of use, and a checksum
    previous = None
    for _, value in _block(data, handle[2], handle[3]):
        offset, position = _varint(value, 0)
        size, _ = _varint(value, position)
        for key, entry in _block(data, offset, size):
            if previous is not None and key <= previous:
                raise ValueError(f"{key!r} is there twice, or not in order")
            previous = key
            yield key, entry


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a block."""
    end = offset + size
    if end + TRAILER_BYTES > len(data) - FOOTER_BYTES or size < 4:
        raise ValueError("a block lies outside the file")
    if masked(crc32c(data[offset : end + 1])) != struct.unpack("<I", data[end + 1 : end + 5])[0]:
        raise ValueError("a block does not have its checksum")
    if data[end]:
        raise ValueError("its blocks are compressed, which TensorFlow does not do")
    (restarts,) = struct.unpack("<I", data[end - 4 : end])
    last = end - 4 - 4 * restarts
    key, position = b"", offset
    while position < last:
        shared, position = _varint(data, position)
        added, position = _varint(data, position)
        length, position = _varint(data, position)
        if shared > len(key) or position + added + length > last:
            raise ValueError("an entry is longer than its block")
        key = key[:shared] + data[position : position + added]
        position += added + length
        yield key, data[position - length : position]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of protobuf's form, and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number is longer than 64 bits")


def _message(data: int | bytes) -> dict[int, list[int | bytes]]:
    """The fields of a message by number."""
    if isinstance(data, int):
        raise ValueError("a number is in the place of a message")
    fields: dict[int, list[int | bytes]] = {}
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, position = _varint(data, position)
        else:
            length, position = _varint(data, position) if kind == 2 else ({5: 4, 1: 8}[kind], position)
            if position + length > len(data):
                raise ValueError("a field is longer than its message")
            piece = data[position : position + length]
            value = piece if kind == 2 else int.from_bytes(piece, "little")
            position += length
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _number(fields: Mapping[int, list[int | bytes]], number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError("a message is in the place of a number")
    return value


def _bytes(fields: Mapping[int, list[int | bytes]], number: int) -> bytes:
    value = fields.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError("a number is in the place of a message")
    return value


# Writing

BLOCK_BYTES = 4096
"""A block of the index is ended by the entry that fills it."""
NUMBERS = {name: number for number, name in DTYPES.items()}
HEADER = b"\x08\x01\x1a\x02\x08\x01"
"""BundleHeaderProto: one file of data, little-endian, version 1."""


def _write(
    prefix: Path,
    sources: Mapping[str, TensorSource],
    on_bytes: Callable[[int], None],
) -> None:
    """Write `<prefix>.data-00000-of-00001`, tensor by tensor, and `<prefix>.index`."""
    from cairn.checkpoint.tensors.reader import as_memory  # imports torch
    from cairn.checkpoint.tensors.stream_writer import pieces_of

    entries = {b"": HEADER}
    data_file = prefix.with_name(f"{prefix.name}.data-00000-of-00001")
    with naming(data_file), open(data_file, "wb") as out:
        for key in sorted(name.encode() for name in sources):
            source = sources[key.decode()]
            offset, crc = out.tell(), 0
            for piece in pieces_of(source):
                data = as_memory(piece)
                crc = crc32c(data, crc)
                out.write(data)
                on_bytes(len(data))
            shape = b"".join(field(2, field(1, size)) for size in source.spec.shape)
            numbers = {4: offset, 5: out.tell() - offset}
            entries[key] = (
                field(1, NUMBERS[source.spec.dtype])
                + field(2, shape)
                + b"".join(field(number, value) for number, value in numbers.items() if value)
                + varint(6 << 3 | 5)
                + struct.pack("<I", masked(crc))
            )
    index_file = prefix.with_name(f"{prefix.name}.index")
    with naming(index_file):
        index_file.write_bytes(table(entries))


def table(entries: Mapping[bytes, bytes]) -> bytes:
    """A table of LevelDB's form, of entries in order."""
    written = bytearray()
    index: dict[bytes, bytes] = {}
    block: dict[bytes, bytes] = {}
    for number, (key, value) in enumerate(entries.items(), start=1):
        block[key] = value
        full = sum(len(key) + len(value) for key, value in block.items()) >= BLOCK_BYTES
        if full or number == len(entries):
            index[key] = _append(written, block)
            block = {}
    footer = _append(written, {}) + _append(written, index)
    return bytes(written) + footer.ljust(FOOTER_BYTES - 8, b"\0") + struct.pack("<Q", MAGIC)


def _append(written: bytearray, entries: Mapping[bytes, bytes]) -> bytes:
    """Append a block, whose keys are all written in full; returns its handle."""
    block, restarts = bytearray(), list[int]()
    for key, value in entries.items():
        restarts.append(len(block))
        block += varint(0) + varint(len(key)) + varint(len(value)) + key + value
    restarts = restarts or [0]
    block += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    handle = varint(len(written)) + varint(len(block))
    block += b"\0"  # not compressed
    written += block + struct.pack("<I", masked(crc32c(bytes(block))))
    return handle


def varint(number: int) -> bytes:
    """A number in protobuf's form."""
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value
