"""Checkpoints in the formats of other programs: written, read, and refused where they are hostile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import make, make_model
from runs import ABOUT, Finished
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cairn.checkpoint.exporting import UNFINISHED
from cairn.checkpoint.step import TRAINER_STATE, TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import write_tensors
from cairn.config.trainer import OptimizerConfig
from cairn.launch import main
from cairn.trainer.model import companions
from cairn.trainer.optimizer import make_optimizer
from cairn.trainer.trained import Trained

FAMILIES = ["qwen3_tied", "qwen3_moe"]
INPUTS = torch.arange(24).reshape(2, 12) * 7 % 90 + 5


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=INPUTS, labels=INPUTS, use_cache=False).loss


def update(trained: Trained) -> float:
    """One optimiser step on INPUTS; returns the loss before it."""
    loss = loss_of(trained.module)
    loss.backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad(set_to_none=True)
    return loss.item()


def begun(family: str) -> Trained:
    """A model after two optimiser steps."""
    model = make_model(family, seed=3).train()
    trained = Trained(model, make_optimizer(model.parameters(), OptimizerConfig(lr=1e-2)))
    update(trained)
    update(trained)
    return trained


def commit(trained: Trained, store: CheckpointStore, step: int, source: Path) -> Path:
    """The step that a run saves; returns its folder."""
    files = {f"model/{name}": data for name, data in companions(trained.module, source).items()}
    record = TrainerRecord(
        progress={"step": step, "total_tokens": 48, "total_samples": 4},
        seed=0,
        optimizer="AdamW",
        recipe={"settings": {"optimizer.lr": 1e-2}},
    )
    files[TRAINER_STATE] = record.to_json()
    store.begin(step, ["model", "trainer"])
    for stem, tensors in trained.tensors().items():
        folder, _, name = stem.rpartition("/")
        write_tensors(source, tensors, f"{name}.new")
        files[f"{folder}/{name}.safetensors"] = (source / f"{name}.new.safetensors").read_bytes()
    store.write_part(step, "files", files, "run:1")
    about = {**ABOUT, "parts": ["trainer"]}
    store.commit(step, {"files": "run:1"}, timeout=0.0, about=about)
    return store.folder(step)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def trained(family: str) -> Trained:
    return begun(family)


@pytest.fixture
def step(trained: Trained, family: str, tmp_path: Path) -> Path:
    return commit(
        trained, CheckpointStore(tmp_path / "run" / "checkpoints"), 2, make(family, tmp_path / "hf")
    )


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run the `ckpt` command in this process."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        code = main.ckpt()
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    return run


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Hugging Face directories


def test_a_hugging_face_folder_of_another_data_type(ckpt, step: Path, tmp_path: Path):
    """In several files, beside tokenizer and template; transformers opens it, and computes the same."""
    out = tmp_path / "out" / "half"
    finished = ckpt("export", step, out, "--dtype", "bfloat16", "--shard-size", "64K")
    assert finished.code == 0, finished.output
    assert "read back and equal" in finished.output
    assert names_in(out.parent) == ["half"]
    files = list(out.glob("*.safetensors"))
    assert len(files) > 2
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert loss_of(model) == loss_of(
        AutoModelForCausalLM.from_pretrained(step / "model", dtype=torch.bfloat16)
    )
    assert AutoTokenizer.from_pretrained(out).chat_template
    beside = {n for n in names_in(step / "model") if ".safetensors" not in n}
    assert beside <= set(names_in(out))
    assert "generation_config.json" in beside


def test_without_options_the_values_are_those_of_the_step(ckpt, step: Path, tmp_path: Path):
    """Given the run's folder, the newest step is meant."""
    assert ckpt("export", tmp_path / "run", tmp_path / "out", "--no-verify").code == 0
    ours, theirs = (load_file(f / "model.safetensors") for f in (step / "model", tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_buffers_keep_their_data_type(ckpt, step: Path, tmp_path: Path):
    """What chooses the experts of a token is not rounded."""
    assert ckpt("export", step, tmp_path / "out", "--dtype", "bfloat16").code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in found if name.endswith("e_score_correction_bias")}
    assert kept


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
def test_an_export_that_fails_leaves_nothing(ckpt, step: Path, tmp_path: Path):
    """What exists stays as it is, a damaged step is not exported, and what a kill left is removed."""
    out = tmp_path / "out"
    out.mkdir()
    refused = ckpt("export", step, out)
    assert (refused.code, "exists already" in refused.output) == (2, True)
    out.rmdir()

    left_over = out.with_name(out.name + UNFINISHED)  # of a process that was killed
    left_over.mkdir()
    (left_over / "model-00001-of-00007.safetensors").write_bytes(b"half")
    assert ckpt("export", step, out).code == 0
    assert "model-00001-of-00007.safetensors" not in names_in(out)
    weights = step / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    refused = ckpt("export", step, tmp_path / "other")
    assert (refused.code, "changed between bytes" in refused.output) == (1, True)
    assert sorted(names_in(tmp_path)) == ["hf", "out", "run"]
