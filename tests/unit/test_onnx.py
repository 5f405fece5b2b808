"""ONNX files: exported by torch, run by onnxruntime, compared with transformers."""

import sys
from pathlib import Path

import draws
import pytest
import torch
from families import make
from transformers import AutoModelForCausalLM

from cairn.checkpoint.manifest import Damaged
from cairn.formats import WriteOptions, no_progress, onnx_writer
from cairn.formats.onnx import Onnx
from cairn.formats.transfer.export_step import content_of_step, export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.run.errors import UsageError

WHY = "the dependency group formats is not installed"
pytest.importorskip("onnx", reason=WHY)
pytest.importorskip("onnxscript", reason=WHY)
onnxruntime = pytest.importorskip("onnxruntime", reason=WHY)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return import_checkpoint(make("qwen3_moe", tmp_path / "hf"), tmp_path / "run", "hf")[0]


@draws.seldom
def test_onnxruntime_computes_the_same(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also for other shapes; weights lie in a file of their own above a size, and damage in it is found."""
    monkeypatch.setattr(onnx_writer, "EXTERNAL_BYTES", 1000)
    out = tmp_path / "out"
    out.mkdir()
    verify = Onnx().write(content_of_step(step), out, WriteOptions())
    assert "onnxruntime computes the same logits" in verify(no_progress)
    names = {path.name for path in out.iterdir()}
    assert {"model.onnx", "model.onnx.data", "tokenizer.json", "config.json"} <= names
    session = onnxruntime.InferenceSession(out / "model.onnx")
    ids = torch.arange(90).reshape(2, 45) % 97
    inputs = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
    (logits,) = session.run(None, inputs)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(step / "model")(input_ids=ids).logits
    assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-4)
    data = bytearray((out / "model.onnx.data").read_bytes())
    for position in range(2, len(data), 4):
        data[position] ^= 0x40  # of each float's fraction
    (out / "model.onnx.data").write_bytes(data)
    with pytest.raises(Damaged, match="onnxruntime computes other logits"):
        verify(no_progress)


def test_a_missing_package_is_named(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"package onnxscript.*uv sync --group formats"):
        export(step, tmp_path / "out", "onnx", WriteOptions())
    assert not (tmp_path / "out").exists()
