"""Files of `torch.save` that are written piece by piece."""

import zipfile
from pathlib import Path

import pytest
import torch

from cairn.checkpoint.formats import torch_writer
from cairn.checkpoint.formats.pickled import held
from cairn.checkpoint.formats.torch_stream import Stream, locate
from cairn.checkpoint.formats.torch_writer import ALIGNMENT, Outgoing
from cairn.checkpoint.manifest import CheckpointError

HERE = Path("here")


def outgoing(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Outgoing:
    return Outgoing(held("x", tensor, HERE), dtype)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_torch_reads_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: bool, large: bool
):
    """Every type and shape, converted or not, and two names of one tensor; checksums are right."""
    if large:  # the ZIP64 fields that entries above 4 GiB need
        monkeypatch.setattr(torch_writer, "ZIP64_BYTES", 8)
    file = tmp_path / "w.pt"
    generator = torch.Generator().manual_seed(1)
    matrix, tied = torch.randn(5, 7, generator=generator), outgoing(torch.ones(2, 3))
    value = {
        "state": {0: {"step": outgoing(torch.tensor(3.0)), "exp_avg": outgoing(matrix)}},
        "half": outgoing(matrix, torch.bfloat16),
        "whole": outgoing(torch.arange(3)),
        "empty": outgoing(torch.zeros(0, 3)),
        "groups": [{"betas": (0.9, 0.99), "fused": True, "foreach": None, "params": [0, 1]}],
        "embed": tied,
        "head": tied,
    }
    torch_writer.save(file, value)
    found = torch.load(file, weights_only=True, mmap=mmap)
    assert found.keys() == value.keys()
    assert found["groups"] == value["groups"]
    assert torch.equal(found["state"][0]["exp_avg"], matrix)
    assert found["state"][0]["step"].shape == ()
    assert torch.equal(found["half"], matrix.bfloat16())
    assert torch.equal(found["whole"], torch.arange(3))
    assert found["empty"].shape == (0, 3)
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert zipfile.ZipFile(file).testzip() is None


def test_values_lie_in_the_file_as_they_are(tmp_path: Path):
    """At multiples of 64 bytes, where the reader of streams finds them with their checksum."""
    file, tensor = tmp_path / "one.pt", torch.arange(6.0).view(2, 3)
    torch_writer.save(file, outgoing(tensor))
    values = locate(Stream(file, 0, file.stat().st_size), torch.float32, (2, 3))
    assert (values.offset % ALIGNMENT, values.crc != 0) == (0, True)
    data = file.read_bytes()[values.offset :][:24]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), tensor.view(-1))


def test_equal_values_make_equal_files(tmp_path: Path):
    for name in ("a.pt", "b.pt"):
        torch_writer.save(tmp_path / name, {"w": outgoing(torch.ones(3)), "step": 2})
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_a_type_without_storage_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no plain storage of data type"):
        torch_writer.save(tmp_path / "w.pt", outgoing(torch.ones(3), torch.uint16))
