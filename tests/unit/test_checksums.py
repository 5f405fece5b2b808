"""Checksums of files that are written and read in pieces, by whomever and in whatever order."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, chunk_crc, make_receipt, read_receipt
from cairn.checkpoint.manifest import FileEntry

DATA = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 12_345)


def slow_crc64nvme(data: bytes) -> int:
    """CRC-64/NVME bit by bit, from its definition: poly ad93d23594c93659, reflected, inverted in and out."""
    polynomial, crc = 0x9A6C9329AC4BC9B5, (1 << 64) - 1  # the polynomial's bits in reverse
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def whole(data: bytes) -> list[int]:
    checksum = FileChecksum(len(data))
    checksum.add(0, data)
    return checksum.chunks()


def test_check_value():
    """The catalogue's check value of CRC-64/NVME, and how it stands in a manifest."""
    assert slow_crc64nvme(b"123456789") == 0xAE8B14860A799888
    assert whole(b"123456789") == [0xAE8B14860A799888]
    assert FileEntry.of(9, whole(b"123456789")).crc64nvme == ["ae8b14860a799888"]
    assert FileEntry.of(1, [1]).crc64nvme == ["0000000000000001"]


@given(st.binary(max_size=300))
def test_it_is_the_standard_crc(data: bytes):
    """As from the definition; a file of no bytes has no chunks."""
    assert whole(data) == ([slow_crc64nvme(data)] if data else [])


def test_chunks_are_the_crcs_of_16_mib():
    """Each chunk's CRC stands for itself: of its bytes alone, the last one being shorter."""
    assert CHUNK_BYTES == 16 << 20
    chunks = [DATA[i : i + CHUNK_BYTES] for i in range(0, len(DATA), CHUNK_BYTES)]
    assert whole(DATA) == [whole(chunk)[0] for chunk in chunks]


PLACES = st.one_of(
    st.integers(0, len(DATA)),
    st.sampled_from([CHUNK_BYTES, 2 * CHUNK_BYTES, len(DATA)]).flatmap(
        lambda edge: st.integers(max(edge - 9, 0), min(edge + 9, len(DATA)))
    ),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(PLACES, max_size=12), st.integers(1, 5), st.randoms(use_true_random=False), PLACES)
def test_any_pieces_in_any_order_make_the_same(cuts, ranks, chance, size):
    """Cut anywhere, shared out over ranks, counted in and merged in any order, by way of receipts."""
    data = memoryview(DATA)[:size]
    ends = sorted({0, size, *(cut for cut in cuts if cut < size)})
    pieces = list(itertools.pairwise(ends))
    chance.shuffle(pieces)
    seen = [FileChecksum(size) for _ in range(ranks)]
    for begin, end in pieces:
        chance.choice(seen).add(begin, data[begin:end])
    chance.shuffle(seen)
    merged = FileChecksum(size)
    for checksum in seen:
        merged.merge(read_receipt(make_receipt("run:1", {"model/x": checksum}))["model/x"])
    assert merged.nbytes == size
    assert merged.chunks() == whole(bytes(data))


@settings(max_examples=25, deadline=None)
@given(PLACES, st.integers(1, 255))
def test_every_changed_byte_changes_its_chunk_and_no_other(place, mask):
    """So damage is found, and located."""
    place = min(place, len(DATA) - 1)
    changed = bytearray(DATA)
    changed[place] ^= mask
    before, after = whole(DATA), whole(changed)
    assert [i for i in range(len(before)) if before[i] != after[i]] == [place // CHUNK_BYTES]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_a_file_on_disk_has_the_same(tmp_path: Path, size: int):
    """Read chunk by chunk; behind its end there is nothing."""
    path = tmp_path / "file"
    path.write_bytes(DATA[:size])
    expected = whole(DATA[:size])
    assert [chunk_crc(path, chunk) for chunk in range(len(expected))] == expected
    assert chunk_crc(path, len(expected)) == 0


def test_bytes_that_nobody_counted_in_are_no_checksum():
    """A file of which a piece is missing, or counted twice, has no checksum: it must not be committed."""
    checksum = FileChecksum(10)
    checksum.add(0, b"12345")
    with pytest.raises(ValueError, match="bytes of a file of 10"):
        checksum.chunks()
    for _ in range(2):
        checksum.add(5, b"67890")
    with pytest.raises(ValueError, match="bytes of a file of 10"):
        checksum.chunks()
