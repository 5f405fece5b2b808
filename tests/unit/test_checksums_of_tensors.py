"""Checksums of tensors: the same however the tensor is divided, other ones for other values."""

from pathlib import Path

import pytest
import torch

from cairn.policy.checksums import (
    RunningSums,
    checksum,
    merged,
    read_checksums,
    remove_checksums,
    wrapped,
    write_checksums,
)
from cairn.run.files import DamagedFile

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def tensor(items: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(items, generator=torch.Generator().manual_seed(items)) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("items", [0, 1, 3, 8, 17, 1000])
def test_parts_come_to_the_same_as_the_whole(dtype: torch.dtype, items: int):
    whole = tensor(items, dtype)
    for cut in {0, min(1, items), min(5, items), items // 2, items}:
        parts = checksum(whole[:cut]), checksum(whole[cut:], cut * dtype.itemsize)
        assert wrapped(parts) == checksum(whole)


def test_it_is_the_sum_of_the_words_of_the_bytes():
    values = torch.arange(5, dtype=torch.int16)
    data = values.numpy().tobytes().ljust(16, b"\0")
    assert checksum(values) == int.from_bytes(data[:8], "little") + int.from_bytes(data[8:], "little")
    assert checksum(torch.full((4,), -1, dtype=torch.int64)) == 2**64 - 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_value_makes_another_checksum(dtype: torch.dtype):
    values = tensor(1000, dtype)
    before = checksum(values)
    for place in (0, 333, 999):
        changed = values.clone()
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert checksum(changed) != before


def test_zeros_that_pad_and_rows_that_are_stacked_change_nothing():
    """So are vLLM's parameters made of the hub's tensors."""
    one, two = tensor(24).view(4, 6), tensor(12).view(2, 6)
    stacked = torch.cat([two, one, torch.zeros(3, 6)])
    assert checksum(stacked) == wrapped([checksum(one), checksum(two)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_tensors_that_pass_by_add_up(dtype: torch.dtype):
    sums, values = RunningSums(), {"a": tensor(1001, dtype), "b": tensor(7, dtype)}
    assert sums.numbers() == {}
    for name, whole in values.items():
        for first in range(0, len(whole), 100):
            sums.add(name, whole[first : first + 100], first * dtype.itemsize)
    assert sums.numbers() == {name: checksum(whole) for name, whole in values.items()}


def test_what_ranks_contribute_adds_up():
    assert merged([{"a": 2**64 - 1, "b": 3}, {"a": 2}]) == {"a": 1, "b": 3}


def test_the_file_comes_and_goes(tmp_path: Path):
    assert read_checksums(tmp_path) is None
    write_checksums(tmp_path, {"a": 2**64 - 1})
    assert read_checksums(tmp_path) == {"a": 2**64 - 1}
    (tmp_path / "checksums.json").write_text('{"a": "1"}')
    with pytest.raises(DamagedFile):
        read_checksums(tmp_path)
    remove_checksums(tmp_path)
    remove_checksums(tmp_path)
    assert read_checksums(tmp_path) is None
