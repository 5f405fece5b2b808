"""An export is opened in the program that it is for, and its logits are compared with the step's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tiny import write_example
from transformers import AutoModelForCausalLM

from cairn.checkpoint.manifest import Damaged
from cairn.formats import WriteOptions
from cairn.formats.transfer.export_step import content_of_step, export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.formats.transfer.opened import compare_logits
from cairn.run.output import no_progress


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened")
    return import_checkpoint(write_example(folder / "model", tied=False), folder / "run", "hf")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("hf", None), ("hf", "BF16"), ("pt", None), ("gguf", None)])
def test_what_is_exported_computes_the_same(step: Path, tmp_path: Path, name: str, dtype: str | None) -> None:
    found = export(step, tmp_path / "out", name, WriteOptions(dtype))
    assert f"; logits in {'gguf' if name == 'gguf' else 'transformers'} " in found
    assert "equal within" in found
    assert "logits" not in export(step, tmp_path / "not", name, WriteOptions(dtype), logits="never")


def scaled(folder: Path) -> None:
    """Another scale of rotary embeddings: names, shapes and values of weights stay."""
    path = folder / "config.json"
    about = json.loads(path.read_text())
    about["rope_parameters"]["rope_theta"] = about["rope_theta"] = 123.0
    path.write_text(json.dumps(about))


def swapped(folder: Path) -> None:
    """Two weights of the same shape under each other's names."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    one, two = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    weights[one], weights[two] = weights[two], weights[one]
    save_file(weights, path, {"format": "pt"})


def nameless(folder: Path) -> None:
    """A model that transformers doesn't know."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "of-next-year"}))


@pytest.mark.parametrize("spoil", [scaled, swapped, nameless])
def test_what_computes_otherwise_is_an_error(step: Path, tmp_path: Path, spoil: Any) -> None:
    """Whatever it is: the comparison does not depend on what was written how."""
    export(step, tmp_path / "out", "hf", WriteOptions())
    spoil(tmp_path / "out")
    with pytest.raises(Damaged, match=r"computes other logits|can't open it"):
        compare_logits("hf", tmp_path / "out", content_of_step(step), WriteOptions(), no_progress)


def test_an_export_that_differs_is_not_left_behind(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that writes another config.json."""
    from cairn.formats.huggingface import huggingface

    written = huggingface.as_file
    monkeypatch.setattr(
        huggingface, "as_file", lambda about: written({**about, "rms_norm_eps": 0.5}), raising=True
    )
    with pytest.raises(Damaged, match="computes other logits"):
        export(step, tmp_path / "out", "hf", WriteOptions("BF16"))
    assert not list(tmp_path.iterdir())


def test_a_large_model_is_compared_only_if_asked(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.formats.transfer.opened.MOST_BYTES", 1 << 20)
    said = export(step, tmp_path / "auto", "hf", WriteOptions())
    assert said.endswith("; logits not compared: 0.0 GiB in float32 (--logits always)")
    assert "equal within" in export(step, tmp_path / "always", "hf", WriteOptions(), logits="always")


def test_an_adapter_is_opened_in_peft(tmp_path: Path) -> None:
    base = write_example(tmp_path / "base", tied=False)
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        PeftConfig(target_modules=["q_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    shutil.copyfile(base / "config.json", tmp_path / "adapter" / "config.json")
    content = content_of_adapter(tmp_path / "adapter", base)
    for path, same in ((tmp_path / "adapter", True), (tmp_path / "other", False)):
        if not same:
            shutil.copytree(tmp_path / "adapter", path)
            about = json.loads((path / "adapter_config.json").read_text())
            (path / "adapter_config.json").write_text(json.dumps(about | {"lora_alpha": 16}))
        if same:
            assert "logits in peft" in compare_logits("peft", path, content, WriteOptions(), no_progress)
        else:
            with pytest.raises(Damaged, match="peft computes other logits"):
                compare_logits("peft", path, content, WriteOptions(), no_progress)


def content_of_adapter(adapter: Path, base: Path) -> Any:
    """As a step's: the merged model, and the folder of the adapter with its config.json."""
    from dataclasses import replace

    from cairn.formats import FORMATS

    return replace(FORMATS["peft"].read(adapter, base), model=adapter)
