"""Writes TensorFlow checkpoints, piece by piece."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from cairn.checkpoint.tensors.reader import as_memory
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import pieces_of
from cairn.formats.tf_reading import DTYPES, FOOTER_BYTES, MAGIC, crc32c, masked
from cairn.run.files import naming

BLOCK_BYTES = 4096
"""A block of the index is ended by the entry that fills it."""
NUMBERS = {name: number for number, name in DTYPES.items()}
HEADER = b"\x08\x01\x1a\x02\x08\x01"
"""BundleHeaderProto: one file of data, little-endian, version 1."""


def write(
    prefix: Path,
    sources: Mapping[str, TensorSource],
    on_bytes: Callable[[int], None],
) -> None:
    """Write `<prefix>.data-00000-of-00001` and `<prefix>.index`.

    Raises:
        OSError: a file can't be written; the error names it.
    """
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
