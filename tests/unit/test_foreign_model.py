"""`--model.name` with the weights of another program: converted once, the same for whoever asks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import make, make_model
from runs import ABOUT, flip
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.model import ModelConfig
from cairn.formats import EXPORTERS, WriteOptions
from cairn.formats.transfer.export_folder import UNFINISHED
from cairn.formats.transfer.export_step import export
from cairn.launch import main
from cairn.launch.plan.model import resolve_model
from cairn.run.errors import UsageError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family in a Hugging Face directory."""
    top = tmp_path_factory.mktemp("hub")
    return {family: make(family, top / family) for family in ("qwen3_tied", "qwen3_moe")}


def step_of(folder: Path, store: CheckpointStore) -> Path:
    """A checkpoint of the model in `folder`."""
    store.begin(1, ["model"])
    files = {f"model/{path.name}": path.read_bytes() for path in folder.iterdir()}
    store.write_part(1, "files", files, "run:1")
    store.commit(1, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "parts": ["model"]})
    return store.folder(1)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def assert_same_model(ours: Path, theirs: Path) -> None:
    """Weights bit for bit, by the hub's names, and a tokenizer."""
    found, expected = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (
        AutoTokenizer.from_pretrained(ours).get_vocab() == AutoTokenizer.from_pretrained(theirs).get_vocab()
    )
    assert "chat_template.jinja" in names_in(ours)
    inputs = torch.arange(12)[None] + 5
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (ours, theirs)]
    assert torch.equal(*(model(input_ids=inputs).logits for model in models))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("name", sorted({"dcp", "pt", "gguf"} & EXPORTERS.keys()))
def test_every_format_that_is_written_starts_a_run(
    folders: dict[str, Path], family: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What is in the folder of the cache is the model; it is made once, and anew when the source changes."""
    if name == "gguf":
        pytest.importorskip("gguf", reason="the dependency group formats is not installed")
        if family == "qwen3_moe":
            pytest.skip("no GGUF of this family")
    folder = folders[family]
    source = tmp_path / "source"
    export(step_of(folder, CheckpointStore(tmp_path / "steps")), source, name, WriteOptions())
    config = ModelConfig(name=str(source), config=str(folder))
    cache = tmp_path / "run" / "converted"
    model = Path(resolve_model(config, cache))
    assert model.parent == cache
    assert (
        f"{source} has the format {name}; its weights are converted once, to {model}"
        in capsys.readouterr().out
    )
    assert_same_model(model, folder)
    made = model.stat().st_mtime_ns
    assert resolve_model(config, cache) == str(model)
    assert model.stat().st_mtime_ns == made
    assert "holds its weights already" in capsys.readouterr().out
    assert names_in(cache) == [".lock", model.name, f"{model.name}.sums.json"]
    weights = next(model.glob("*.safetensors"))
    flip(weights, weights.stat().st_size - 10)
    assert resolve_model(config, cache) == str(model)
    assert f"{model} is made again: {weights.name} is not what was written" in capsys.readouterr().out
    assert_same_model(model, folder)
    (source / "more").touch()
    assert resolve_model(config, cache) != str(model)


def test_a_file_of_torch_and_an_older_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A state dict in memory's names; pytorch_model.bin beside its config.json needs no other folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save({"model": make_model("qwen3_moe").state_dict()}, tmp_path / "weights.pt")
    config = ModelConfig(name=str(tmp_path / "weights.pt"), config=str(folders["qwen3_moe"]))
    model = Path(resolve_model(config))
    assert model.parent == tmp_path / "cache" / "cairn" / "models"
    assert_same_model(model, folders["qwen3_moe"])
    older = tmp_path / "older"
    shutil.copytree(folders["qwen3_tied"], older)
    torch.save(load_file(older / "model.safetensors"), older / "pytorch_model.bin")
    assert resolve_model(ModelConfig(name=str(older))) == str(older), "safetensors need no conversion"
    (older / "model.safetensors").unlink()
    model = Path(resolve_model(ModelConfig(name=str(older))))
    assert_same_model(model, folders["qwen3_tied"])
    assert "pytorch_model.bin" not in names_in(model)


def test_trainers_checkpoint_and_a_step_are_read_as_they_are(folders: dict[str, Path], tmp_path: Path):
    """Their weights are a Hugging Face directory already."""
    trainers = tmp_path / "checkpoint-2"
    shutil.copytree(folders["qwen3_tied"], trainers)
    (trainers / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    (trainers / "training_args.bin").write_bytes(b"a pickle")
    assert resolve_model(ModelConfig(name=str(trainers)), tmp_path / "cache") == str(trainers)
    step = step_of(folders["qwen3_tied"], CheckpointStore(tmp_path / "steps"))
    assert resolve_model(ModelConfig(name=str(step)), tmp_path / "cache") == str(StepFolder(step).model)
    assert not (tmp_path / "cache").exists()


def test_what_is_missing_is_named(folders: dict[str, Path], tmp_path: Path):
    """A configuration, a tokenizer, or weights; nothing is left in the cache."""
    weights = make_model("qwen3_tied").state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    cache = tmp_path / "cache"

    def refused(config: Path | None, source: Path = tmp_path / "weights.pt") -> str:
        with pytest.raises(UsageError) as error:
            resolve_model(ModelConfig(name=str(source), config=str(config) if config else None), cache)
        assert not [name for name in names_in(cache) if name != ".lock"]
        return str(error.value)

    assert "has no config.json beside it; give the folder of its model with --model.config" in refused(None)
    assert f"--model.config {tmp_path}: it has no config.json" in refused(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(folders["qwen3_tied"] / "config.json", bare / "config.json")
    assert "has no tokenizer beside it; give the folder of its model with --model.config" in refused(bare)
    assert "have no place in the model that config.json describes" in refused(folders["qwen3_moe"])
    del weights["model.norm.weight"]
    torch.save(weights, tmp_path / "less.pt")
    said = refused(folders["qwen3_tied"], tmp_path / "less.pt")
    assert "these weights of the model are missing: model.norm.weight" in said
    (tmp_path / "empty").mkdir()
    said = refused(None, tmp_path / "empty")
    assert "has no config.json, so it is not a Hugging Face model, nor has it another format" in said


def test_a_killed_conversion_is_begun_again(folders: dict[str, Path], tmp_path: Path):
    """What it left is not taken for the model."""
    torch.save(make_model("qwen3_tied").state_dict(), tmp_path / "weights.pt")
    config = ModelConfig(name=str(tmp_path / "weights.pt"), config=str(folders["qwen3_tied"]))
    model = Path(resolve_model(config, tmp_path / "cache"))
    left_over = model.rename(model.with_name(model.name + UNFINISHED))
    (left_over / "model.safetensors").write_bytes(b"half")
    assert resolve_model(config, tmp_path / "cache") == str(model)
    assert_same_model(model, folders["qwen3_tied"])
    assert names_in(tmp_path / "cache") == [".lock", model.name, f"{model.name}.sums.json"]


def test_a_dry_run_converts_nothing(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """It says that the run would, and estimates by the configuration that was given."""
    torch.save(make_model("qwen3_tied").state_dict(), tmp_path / "weights.pt")
    flags = ["--model.name", tmp_path / "weights.pt", "--model.config", folders["qwen3_tied"]]
    argv = ["sft", "--dry-run", *flags, "--output-dir", tmp_path / "run"]
    monkeypatch.setattr("sys.argv", [*map(str, argv)])
    assert main.sft() == 0
    said = capsys.readouterr().err
    assert "has the format pt; its weights are converted once, before the start" in said
    assert "training needs about" in said
    assert names_in(tmp_path) == ["weights.pt"]
