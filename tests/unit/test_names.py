"""Names and parts of tensors in files: the hub's, whatever transformers makes of them in memory."""

import json
from pathlib import Path

import draws
import pytest
import torch
from fake_ranks import FakeRank, as_rank
from families import FAMILIES, make, make_config, make_model
from runs import assert_same_bits
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.placement import at_places
from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.model import ModelConfig
from cairn.inference.plugin.weight_files import ExpectedTensors
from cairn.launch.plan.model import resolve_model
from cairn.model.hub_layout import LayoutUnknown, hub_layout, tensors_in_memory
from cairn.run.errors import UsageError
from cairn.trainer.models.model import weights_in

CONVERTED = ["gpt_neox", "qwen3_moe", "mixtral", "granitemoe", "deepseek_v3", "jamba", "gemma3"]
"""Families whose files hold other names or tensors than transformers has in memory, each in its own way."""


@pytest.mark.parametrize("family", draws.cases(list(FAMILIES), __name__, 12, always=CONVERTED))
def test_a_folder_of_the_hub_is_written_as_it_was_read(tmp_path: Path, family: str):
    """By three ranks, each of which reads and writes its ranges of files only: names, shapes and values."""
    published = make(family, tmp_path / "published")
    expected = load_file(published / "model.safetensors")
    layout = hub_layout(AutoConfig.from_pretrained(published))
    assert {name: place.shape for name, place in layout.places.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    blank = {name: torch.zeros_like(t) for name, t in tensors_in_memory(make_model(family)).items()}
    written = tmp_path / "written"
    written.mkdir()
    seen = None
    for rank in range(3):
        with FakeRank(rank, 3) as mesh:
            shards = as_rank(blank, mesh)
            places = layout.find(find_tensors(published, "model").keys())
            (checksum,) = read_tensors(published, at_places(shards, places), "model", rank=rank).values()
            seen = seen or FileChecksum(checksum.size)
            seen.merge(checksum)
            write_tensors(written, at_places(shards, layout.places), "model", rank=rank)
    assert seen.nbytes == seen.size
    assert_same_bits(load_file(written / "model.safetensors"), expected)


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """They would else be missing from every checkpoint without a word; copies of tied ones are no news."""
    folder = make("qwen3_tied", tmp_path / "hub")
    tensors = load_file(folder / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": copy}, folder / "model.safetensors", {"format": "pt"})
    weights_in(make_model("qwen3_tied"), folder)
    assert not caplog.records
    extra = {f"model.layers.2.mtp.{i}": copy.clone() for i in range(5)}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    weights_in(make_model("qwen3_tied"), folder)
    (record,) = caplog.records
    assert "left out of checkpoints: model.layers.2.mtp.0, " in record.getMessage()
    assert record.getMessage().endswith("model.layers.2.mtp.2 and 2 more")


@pytest.mark.parametrize("family", CONVERTED)
def test_files_under_transformers_own_names_are_read(tmp_path: Path, family: str):
    """As earlier versions of Cairn wrote them."""
    model = make_model(family)
    own = {name: tensor.detach() for name, tensor in tensors_in_memory(model).items()}
    layout = hub_layout(make_config(family))
    assert layout.places.keys() != own.keys()
    write_tensors(tmp_path, own, "model")
    targets = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    places = layout.find(find_tensors(tmp_path, "model").keys())
    read_tensors(tmp_path, at_places(targets, places), "model")
    assert_same_bits(targets, own)


@pytest.mark.parametrize(
    ("family", "renames"),
    [
        pytest.param("gpt2", [("transformer.", "")], id="without the base model's prefix"),
        pytest.param("bloom", [("transformer.", "")], id="the same, tied"),
        pytest.param("qwen3_moe", [("model.", "")], id="experts without the prefix"),
        pytest.param(
            "gemma3",
            [("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")],
            id="some names new and some old",
        ),
    ],
)
def test_older_names_are_read(tmp_path: Path, family: str, renames: list[tuple[str, str]]):
    """Those that transformers renames on loading, and copies of tied tensors or others that it leaves out."""
    published = make(family, tmp_path / "published")
    held = load_file(published / "model.safetensors")
    for old, new in renames:
        held = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in held.items()}
    held["rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(held, published / "model.safetensors", {"format": "pt"})
    own = tensors_in_memory(make_model(family))
    targets = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    places = hub_layout(make_config(family)).find(held.keys())
    read_tensors(published, at_places(targets, places), "model")
    assert_same_bits(targets, {name: tensor.detach() for name, tensor in own.items()})


def test_what_is_missing_is_named_as_on_the_hub(tmp_path: Path):
    """One expert's matrix of a layer."""
    published = make("qwen3_moe", tmp_path)
    held = load_file(published / "model.safetensors")
    del held["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(held, published / "model.safetensors")
    model = make_model("qwen3_moe")
    targets = at_places(tensors_in_memory(model), hub_layout(model.config).find(held.keys()))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.2.up_proj.weight' \(1 missing in all"):
        read_tensors(published, targets, "model")


def test_tensors_that_are_joined_on_the_hub_are_refused():
    """HRM's files hold one tensor of what transformers keeps as several."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32}
    config = AutoConfig.for_model("hrm_text", **sizes)
    with pytest.raises(LayoutUnknown, match=r"HrmTextForCausalLM can't be trained: its files hold .*proj"):
        hub_layout(config)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "mixtral"])
def test_a_model_from_a_seed_is_as_transformers_would_publish_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    """With the buffers that belong to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "config"
    make_config(family).save_pretrained(config)
    folder = Path(resolve_model(ModelConfig(name=str(config), init_seed=3)))
    model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"] | about["unexpected_keys"]
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("damage", ["zeros", "cut", "gone", "config", "no sums"])
def test_kept_random_weights_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
):
    """A power cut may leave anything of a file; an earlier version has kept no checksums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "config"
    make_config("qwen3").save_pretrained(config)
    asked = ModelConfig(name=str(config), init_seed=3)
    folder = Path(resolve_model(asked))
    path = folder / "model.safetensors"
    good = path.read_bytes()
    capsys.readouterr()
    assert resolve_model(asked) == str(folder)
    assert capsys.readouterr().out == ""
    middle = len(good) // 2
    if damage == "zeros":
        path.write_bytes(good[:middle] + bytes(4096) + good[middle + 4096 :])
    elif damage == "cut":
        path.write_bytes(good[:middle])
    elif damage == "gone":
        path.unlink()
    elif damage == "config":
        (folder / "config.json").write_bytes(b"")
    else:
        folder.with_name(f"{folder.name}.sums.json").unlink()
    assert resolve_model(asked) == str(folder)
    assert f"{folder} is made again: " in capsys.readouterr().out
    assert path.read_bytes() == good
    assert resolve_model(asked) == str(folder)
    assert capsys.readouterr().out == ""


def test_quantized_weights_are_refused_before_anything_is_read(tmp_path: Path):
    """As the hub's gpt-oss has them; with what to do instead."""
    folder = make("gpt_oss", tmp_path)
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(about))
    tensors = load_file(folder / "model.safetensors")
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{experts}_blocks"] = torch.zeros(4, 8, 2, 16, dtype=torch.uint8)
    tensors[f"{experts}_scales"] = torch.zeros(4, 8, 2, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"its weights are quantized \(mxfp4\).*save_pretrained"):
        resolve_model(ModelConfig(name=str(folder)))


@pytest.mark.parametrize("family", ["llama", "qwen3_tied", *CONVERTED])
def test_a_server_cuts_tensors_as_the_trainers_files_do(tmp_path: Path, family: str):
    """From those in memory it gets what the hub's folder holds, and it knows the names and shapes of both."""
    published = load_file(make(family, tmp_path) / "model.safetensors")
    model = make_model(family)
    own = {name: tensor.detach() for name, tensor in tensors_in_memory(model).items()}
    expected = ExpectedTensors(make_config(family))
    assert_same_bits(expected.to_hub(own), published)
    for layout, tensors in ((expected.hub, published), (expected.own, own)):
        assert expected.layout_of(tensors) == layout
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        assert layout.shapes == {**shapes, **{name: shapes[of] for name, of in layout.tied.items()}}
    assert len(expected.hub.tied) == len(expected.own.tied) == (family in ("qwen3_tied", "gemma3"))
