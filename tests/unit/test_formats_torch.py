"""Files of `torch.save` that are written piece by piece."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import make
from runs import Finished
from safetensors.torch import load_file
from test_formats import begun, ckpt, commit, loss_of
from transformers import AutoConfig, AutoModelForCausalLM

from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.verified_copy import noted
from cairn.formats.common.match_layout import Outgoing
from cairn.formats.torch_file import torch_writer
from cairn.formats.torch_file.pickled import held
from cairn.formats.torch_file.torch_stream import Stream, locate
from cairn.formats.torch_file.torch_writer import ALIGNMENT

ckpt = ckpt

HERE = Path("here")


def outgoing(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Outgoing:
    return Outgoing(noted({"x": held("x", tensor, HERE)}, {"x": dtype or tensor.dtype})["x"])


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
    values = locate("x", Stream(file, 0, file.stat().st_size), torch.float32, (2, 3))
    assert (values.offset % ALIGNMENT, values.crc != 0) == (0, True)
    data = file.read_bytes()[values.offset :][:24]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), tensor.view(-1))


def test_equal_values_make_equal_files(tmp_path: Path):
    for name in ("a.pt", "b.pt"):
        torch_writer.save(tmp_path / name, {"w": outgoing(torch.ones(3)), "step": 2})
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_tied", "qwen3_moe"])
def test_a_state_dict_in_one_file(ckpt: Callable[..., Finished], tmp_path: Path, family: str):
    """transformers' own model takes it as it is; and it comes back as a step of weights."""
    trained = begun(family)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    step = commit(trained, store, 2, make(family, tmp_path / "hf"))
    for out, options in ((tmp_path / "out", ()), (tmp_path / "half", ("--dtype", "bfloat16"))):
        finished = ckpt("export", step, out, "--format", "pt", *options)
        assert finished.code == 0, finished.output
        assert "read back and equal" in finished.output
    weights = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    model.load_state_dict(weights, strict=True)
    assert loss_of(model.eval()) == loss_of(trained.module.eval())
    tied = weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert tied == (family == "qwen3_tied")
    half = torch.load(tmp_path / "half" / "model.pt", weights_only=True)
    assert half.keys() == weights.keys()
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in half)
    finished = ckpt("import", tmp_path / "out", tmp_path / "again")
    assert "has the format pt, by its files" in finished.output
    again = CheckpointStore(tmp_path / "again" / "checkpoints").folder(1) / "model" / "model.safetensors"
    ours, theirs = load_file(again), load_file(step / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
