"""Two readers of one model agree: what config.json says of weights is compared with the weights."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, make, make_config
from safetensors.torch import load_file, save_file
from tiny import random_model, write, write_example
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cairn.checkpoint.manifest import CheckpointError
from cairn.config.model import ModelConfig
from cairn.formats import FORMATS, WriteOptions, format_of
from cairn.formats.transfer.diff import compare
from cairn.formats.transfer.export_step import export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.launch.plan.model import described, foreign_format, resolve_model
from cairn.model.described import about_model, carried_over, with_both_forms
from cairn.run.errors import UsageError
from cairn.run.recipe import model_of, tokenizer_of

IDS = torch.arange(4, 60)[None]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    about = json.loads(path.read_text())
    for key, value in changes.items():
        about.pop(key, None) if value is None else about.update({key: value})
    path.write_text(json.dumps(about))


def imported(source: Path, out: Path, name: str, model: Path | None = None) -> tuple[Path, Any]:
    folder, _, content = import_checkpoint(source, out, name, model=model)
    return folder / "model", content


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """A model with two matrices, whose config.json says that they are one."""
    folder = write_example(tmp_path / "untied", tied=False)
    edit(folder, tie_word_embeddings=True)
    return folder


# Tied weights


def saved_as(form: str, untied: Path, folder: Path) -> Path:
    """The same weights in another format."""
    weights = load_file(untied / "model.safetensors")
    if form == "hf":
        return untied
    if form == "pt":
        torch.save(weights, folder / "weights.pt")
        return folder / "weights.pt"
    if form == "bin":
        older = folder / "older"
        shutil.copytree(untied, older, ignore=shutil.ignore_patterns("*.safetensors"))
        torch.save(weights, older / "pytorch_model.bin")
        return older
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": weights}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize("form", ["hf", "pt", "bin", "dcp"])
def test_two_matrices_that_config_json_calls_tied_are_both_kept(
    untied: Path, tmp_path: Path, form: str
) -> None:
    """T10: the head was thrown away, by every reader; transformers keeps both."""
    expected = logits(untied)
    source = saved_as(form, untied, tmp_path)
    name = format_of(source)
    assert name
    model, content = imported(source, tmp_path / "out", name, untied)
    assert any("tie_word_embeddings is false now: lm_head.weight differs" in one for one in content.said)
    assert about_model(model)["tie_word_embeddings"] is False
    assert torch.equal(logits(model), expected)


def test_a_run_begins_with_a_corrected_copy(untied: Path, tmp_path: Path, capsys: Any) -> None:
    """All roles read the same folder, which agrees with itself; a dry run finds the same."""
    config = ModelConfig(name=str(untied))
    assert foreign_format(untied) == "hf"
    assert described(config) == untied
    folder = Path(resolve_model(config, tmp_path / "cache"))
    assert "tie_word_embeddings is false now" in capsys.readouterr().out
    assert foreign_format(folder) is None
    assert torch.equal(logits(folder), logits(untied))


def test_equal_copies_are_stored_once(tmp_path: Path) -> None:
    """Older programs save both names of a tied weight, which are the same."""
    folder = write_example(tmp_path / "tied", tied=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert foreign_format(folder) is None
    model, content = imported(folder, tmp_path / "out", "hf")
    assert not content.said
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    assert torch.equal(logits(model), logits(folder))


def test_a_comparison_shows_a_head_that_is_no_copy(untied: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(untied, other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    rows = {row["name"]: row for row in compare(untied, other)["tensors"]}
    assert rows["lm_head.weight"]["max_change"] == pytest.approx(1.0)


# Quantisation


def test_what_a_merge_left_behind_is_dropped_and_said(tmp_path: Path) -> None:
    """T21: an import took the entry over, and a run of the step was refused for it."""
    folder = write_example(tmp_path / "merged")
    edit(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    model, content = imported(folder, tmp_path / "out", "hf")
    assert content.said == (
        "config.json: quantization_config is dropped: the weights are not quantized, by their data types",
    )
    assert "quantization_config" not in about_model(model)
    for name in (folder, model):
        resolved = Path(resolve_model(ModelConfig(name=str(name)), tmp_path / "cache"))
        assert "quantization_config" not in about_model(resolved)


@pytest.mark.parametrize("said", [True, False])
def test_quantised_weights_are_refused_by_every_reader(tmp_path: Path, said: bool) -> None:
    folder = write_example(tmp_path / "quantised")
    if said:
        edit(folder, quantization_config={"quant_method": "bitsandbytes"})
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24576, 1, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="its weights are quantized"):
        import_checkpoint(folder, tmp_path / "out", "hf")
    if said:
        with pytest.raises(UsageError, match=r"quantized \(bitsandbytes\)"):
            described(ModelConfig(name=str(folder)))


# Names


WRAPPED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "checkpointed": lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
    "fully sharded": lambda name: f"_fsdp_wrapped_module.{name}".replace(
        "layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module."
    ),
    "compiled layers": lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
    "an attribute": lambda name: f"net.{name}",
    "Lightning's": lambda name: f"model.{name}",
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("tied", [True, False])
def test_names_of_wrapped_modules_are_taken_apart(tmp_path: Path, wrapped: str, tied: bool) -> None:
    """T36: they were refused, though a prefix is the same in all."""
    folder = write_example(tmp_path / "model", tied=tied)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(
        {"state_dict": {WRAPPED[wrapped](name): one for name, one in weights.items()}, "epoch": 1},
        tmp_path / "last.ckpt",
    )
    assert format_of(tmp_path / "last.ckpt") == "pt"
    model, content = imported(tmp_path / "last.ckpt", tmp_path / "out", "pt", folder)
    assert content.said or wrapped == "Lightning's"
    assert torch.equal(logits(model), logits(folder))


def test_a_folder_of_a_compiled_model_is_corrected(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "model")
    expected = logits(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({f"_orig_mod.{name}": one for name, one in weights.items()}, folder / "model.safetensors")
    assert torch.equal(logits(Path(resolve_model(ModelConfig(name=str(folder)), tmp_path / "c"))), expected)


def test_two_names_of_one_weight_are_refused(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["_orig_mod.model.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both _orig_mod.model.norm.weight and model.norm.weight"):
        import_checkpoint(folder, tmp_path / "out", "hf")


BUFFERS: Mapping[str, Mapping[str, torch.Tensor]] = {
    "gpt2": {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    },
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(4),
    },
    "llama": {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(16)},
}


@pytest.mark.parametrize("family", BUFFERS)
def test_buffers_of_older_files_are_passed_over_and_said(tmp_path: Path, family: str) -> None:
    """GPT-2's, Pythia's and Llama 2's files hold what their models compute; as a file and as a folder."""
    folder = make(family, tmp_path / "model")
    expected = logits(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **BUFFERS[family]}, folder / "model.safetensors", {"format": "pt"})
    model, content = imported(folder, tmp_path / "out", "hf")
    assert content.said[-1].startswith("buffers that the model computes by itself are passed over: ")
    assert all(name in content.said[-1] for name in BUFFERS[family])
    assert torch.equal(logits(model), expected)


def test_a_weight_that_only_resembles_a_buffer_is_refused(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.bias"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no place in the model .*model.layers.0.self_attn.bias"):
        import_checkpoint(folder, tmp_path / "out", "hf")


# Forms of config.json


ROTARY = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("scaling", ROTARY)
def test_a_config_of_transformers_4_is_carried_over(tmp_path: Path, scaling: str) -> None:
    """T13: rope_theta and rope_scaling were gone from exports, and programs took 10000 and none."""
    folder = make("llama", tmp_path / "model")
    edit(
        folder, rope_parameters=None, rope_theta=5e5, rope_scaling=ROTARY[scaling], dtype=None,
        torch_dtype="float32", transformers_version="4.57.3", of_another_program={"a": [1]},
    )  # fmt: skip
    source = about_model(folder)
    config = AutoConfig.from_pretrained(folder)
    written = json.loads(carried_over(source, config, torch.bfloat16))
    assert written == {**source, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config.tie_word_embeddings = True
    assert json.loads(carried_over(source, config, None)) == {
        **source, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    model, _ = imported(folder, tmp_path / "out", "hf")
    export(model.parent, tmp_path / "exported", "hf", WriteOptions())
    for step in (model, tmp_path / "exported"):
        assert {**about_model(step), "dtype": None} == {**source, "dtype": None}
        assert torch.equal(logits(step), logits(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_of_a_config_mean_the_same(tmp_path: Path, family: str) -> None:
    """transformers 5 reads the same configuration; and what names its architecture stays as it was."""
    make_config(family).save_pretrained(tmp_path)
    before, digest = AutoConfig.from_pretrained(tmp_path).to_dict(), model_of(tmp_path)
    about = with_both_forms(about_model(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(about))
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {key: after[key] for key in before} == before
    assert model_of(tmp_path) == digest
    assert with_both_forms(about) == about
    rotary = about.get("rope_parameters")
    if rotary and "rope_theta" in rotary:
        assert rotary["rope_theta"] in (about.get("rope_theta"), about.get("rotary_emb_base"))


OLDER = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM
assert transformers.__version__.startswith("4."), transformers.__version__
ids, wanted = torch.load(sys.argv[2])
found = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()(input_ids=ids).logits
difference = (found - wanted).abs().max().item()
assert difference < 1e-4 * wanted.abs().max().item(), difference
"""


@pytest.mark.skipif("TRANSFORMERS_4" not in os.environ, reason="TRANSFORMERS_4 names no folder that has it")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_neox", "gemma3_text", "phi3", "deepseek_v3"])
def test_transformers_4_opens_an_export_with_the_same_logits(tmp_path: Path, family: str) -> None:
    """The folder is that of `uv pip install --target FOLDER --no-deps transformers==4.57.3 ...`."""
    scaling = {"rope_scaling": ROTARY["linear"]} if family in ("llama", "qwen3_moe", "deepseek_v3") else {}
    config = AutoConfig.for_model(
        FAMILIES[family].model_type, **{**FAMILIES[family].settings, "rope_theta": 54321.0, **scaling}
    )
    folder = write(random_model(config), tmp_path / "model")
    model, _ = imported(folder, tmp_path / "out", "hf")
    export(model.parent, tmp_path / "exported", "hf", WriteOptions())
    torch.save((IDS, logits(folder)), tmp_path / "logits.pt")
    paths = os.pathsep.join([os.environ["TRANSFORMERS_4"], *sys.path])
    command = [sys.executable, "-c", OLDER, str(tmp_path / "exported"), str(tmp_path / "logits.pt")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})


# Tokenizers


def test_all_chat_templates_travel(tmp_path: Path) -> None:
    """T12: those in additional_chat_templates/ were lost, and tools vanished from prompts."""
    folder = write_example(tmp_path / "model")
    made = AutoTokenizer.from_pretrained(folder)
    made.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}{{ messages }}"}
    made.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    model, _ = imported(folder, tmp_path / "out", "hf")
    for name in ("hf", "pt"):
        export(model.parent, tmp_path / name, name, WriteOptions())
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "weights.pt")
    config = ModelConfig(name=str(tmp_path / "weights.pt"), config=str(folder))
    converted = Path(resolve_model(config, tmp_path / "cache"))
    for found in (model, tmp_path / "hf", tmp_path / "pt", converted):
        assert AutoTokenizer.from_pretrained(found).chat_template == made.chat_template
        assert tokenizer_of(found) == tokenizer_of(folder)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ other }}")
    assert tokenizer_of(model) != tokenizer_of(folder)


# accelerate


@pytest.mark.parametrize("tied", [True, False])
def test_accelerates_folders(tmp_path: Path, tied: bool) -> None:
    """T31: with the model's folder the weights and AdamW's state are taken over; without it, what to give."""
    from accelerate import Accelerator

    folder = write_example(tmp_path / "model", tied=tied)
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
        optimizer.zero_grad()
    state = tmp_path / "state"
    accelerator.save_state(str(state))
    assert format_of(state) == "accelerate"
    with pytest.raises(UsageError, match=r"accelerate's save_state .* --model FOLDER"):
        FORMATS["accelerate"].read(state)
    step, content = imported(state, tmp_path / "out", "accelerate", folder)
    with torch.no_grad():
        assert torch.equal(logits(step), model(input_ids=IDS).logits)
    assert (content.step, content.optimizer) == (3, "AdamW")
    assert content.settings["optimizer.lr"] == 1e-3
    saved = load_file(step.parent / "trainer" / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        mine = optimizer.state[parameter]
        assert torch.equal(saved[f"{name}.exp_avg"], mine["exp_avg"])
        assert torch.equal(saved[f"{name}.exp_avg_sq"], mine["exp_avg_sq"])

    content = torch.load(state / "optimizer.bin", weights_only=True)
    content["state"] = {n: content["state"][len(content["state"]) - 1 - n] for n in content["state"]}
    torch.save(content, state / "optimizer.bin")
    found = FORMATS["accelerate"].read(state, folder)
    assert set(found.tensors) == {"model/model"}
    assert any("its order is another one" in line for line in found.left_out)
