"""Checkpoints in the formats of other programs: written, read, and refused where they are hostile."""

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from families import make, make_model
from huggingface_hub import ModelCard
from runs import ABOUT, Finished
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cairn.checkpoint.step_folder import MODEL, OPTIMIZER, TRAINER_STATE, StepFolder, TrainerRecord, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import load_step, write_tensors
from cairn.config.optimizer import AdamWConfig
from cairn.formats import WriteOptions
from cairn.formats.transfer.export_step import UNFINISHED, export
from cairn.launch import main
from cairn.trainer.models.model import companions
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer

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
    trained = Trained(model, make_optimizer(model.named_parameters(), AdamWConfig(lr=1e-2)))
    update(trained)
    update(trained)
    return trained


def commit(
    trained: Trained,
    store: CheckpointStore,
    step: int,
    source: Path,
    settings: Mapping[str, object] = MappingProxyType({"optimizer.lr": 1e-2}),
) -> Path:
    """The step that a run with these settings saves; returns its folder."""
    files = {f"model/{name}": data for name, data in companions(trained.module, source).items()}
    record = TrainerRecord(
        progress={"step": step, "total_tokens": 48, "total_samples": 4},
        seed=0,
        optimizer="AdamW",
        recipe={"settings": dict(settings), "base": "tiny/model", "data": {"records": 4}},
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


@pytest.mark.parametrize("family", ["qwen3_tied"], indirect=True)
@pytest.mark.parametrize("name", ["hf", "dcp", "pt", "tf"])
def test_progress_counts_what_is_written(step: Path, tmp_path: Path, name: str):
    """Of formats with weights only, no more than these; so the bar is full when the last one is written."""
    stages: dict[str, list[int]] = {}

    def stage(title: str, total: int) -> Callable[[int], None]:
        told = stages[title] = [total]
        return told.append

    export(step, tmp_path / "out", name, WriteOptions(), stage=stage)
    total, *told, rest = stages[f"writing {name}"]
    assert total > 0
    assert (sum(told), rest) == (total, 0)


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


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
def test_a_model_card_says_where_the_weights_come_from(ckpt, step: Path, tmp_path: Path):
    """In the form that the hub reads; one that is exported again keeps what is known."""
    settings = {
        "data": {"name": "ours/records", "sets": [{"name": "hub/chat"}, {"name": "/home/me/my.jsonl"}]}
    }
    (step.parent.parent / "config.json").write_text(json.dumps(settings))
    assert ckpt("export", step, tmp_path / "out", "--dtype", "bfloat16").code == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "tiny/model",
        "datasets": ["hub/chat"],
        "tags": ["cairn", "sft"],
    }
    run = verify(step).run_id
    for line in ("# model", "The weights of step 2 of a run", "- Data type: bfloat16", f"- Run: {run}"):
        assert f"\n{line}" in card.text, line
    assert "- Samples trained on: 4\n" in card.text
    assert "- Data: hub/chat, my.jsonl\n" in card.text
    assert "optimizer.lr = 0.01\n" in card.text


# Trainer's folders


def trainer_folder(trained: Trained, folder: Path, family: str) -> torch.optim.AdamW:
    """A checkpoint-2 as transformers' Trainer writes it, of two further steps; returns its optimiser."""
    module = trained.module
    decay = {name: p for name, p in module.named_parameters() if "norm" not in name}
    others = {name: p for name, p in module.named_parameters() if "norm" in name}
    groups = [
        {"params": list(decay.values()), "weight_decay": 0.01},
        {"params": list(others.values()), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    trained.optimizer = optimizer
    update(trained)
    update(trained)
    make(family, folder)
    module.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "epoch": 0.5}))
    (folder / "training_args.bin").write_bytes(b"a pickle")
    return optimizer


def test_a_run_goes_on_from_trainers_checkpoint(ckpt, trained: Trained, family: str, tmp_path: Path):
    """The step that is made has the weights and AdamW's state: the next updates are the source's own."""
    folder = tmp_path / "checkpoint-2"
    trainer_folder(trained, folder, family)
    finished = ckpt("import", folder, tmp_path / "run")
    assert finished.code == 0, finished.output
    assert "has the format hf-trainer, by its files" in finished.output
    assert "left out: training_args.bin" in finished.output
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    manifest = verify(store.folder(2))
    assert (store.latest(), manifest.parts) == (2, ["trainer"])
    record = StepFolder(store.folder(2)).trainer_state()
    assert record is not None
    assert record.progress == {"step": 2, "total_tokens": 0, "total_samples": 0}
    assert record.recipe is not None
    assert record.recipe["settings"]["optimizer.betas"] == [0.9, 0.99]
    model = make_model(family, seed=9).train()
    config = AdamWConfig(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01)
    resumed = Trained(model, make_optimizer(model.named_parameters(), config))
    resumed.create_optimizer_state(StepFolder(store.folder(2)).tensors(OPTIMIZER))
    load_step(store.folder(2), {**resumed.tensors(), MODEL: resumed.loaded(store.folder(2) / "model")})
    for _ in range(3):
        assert update(resumed) == pytest.approx(update(trained), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
def test_what_does_not_fit_is_listed(ckpt, trained: Trained, family: str, tmp_path: Path):
    """Weights that are missing, and state of something else; nothing is left behind."""
    folder = tmp_path / "checkpoint-2"
    optimizer = trainer_folder(trained, folder, family)
    weights = load_file(folder / "model.safetensors")
    whole = dict(weights)
    del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    finished = ckpt("import", folder, tmp_path / "run")
    assert finished.code == 1
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in finished.output
    save_file({**whole, "model.extra": torch.zeros(3)}, folder / "model.safetensors")
    finished = ckpt("import", folder, tmp_path / "run")
    assert "have no place in the model that config.json describes: model.extra" in finished.output
    save_file(whole, folder / "model.safetensors")
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, folder / "optimizer.pt")
    finished = ckpt("import", folder, tmp_path / "run")
    assert "the state of weight 0 has shape [3]" in finished.output
    assert CheckpointStore(tmp_path / "run" / "checkpoints").debris() == []


# Files of torch.save


@pytest.mark.parametrize("entry", [None, "model", "state_dict"])
def test_weights_in_one_file(ckpt, family: str, tmp_path: Path, entry: str | None):
    """They make a step of weights only, by the hub's names, whatever they are called in the file."""
    folder = make(family, tmp_path / "hf")
    model = make_model(family)
    content = {entry: model.state_dict(), "epoch": 3} if entry else model.state_dict()
    torch.save(content, tmp_path / "weights.pt")
    refused = ckpt("import", tmp_path / "weights.pt", tmp_path / "run")
    assert (refused.code, "--model FOLDER" in refused.output) == (2, True)
    finished = ckpt("import", tmp_path / "weights.pt", tmp_path / "run", "--model", folder)
    assert finished.code == 0, finished.output
    assert f"--model.name {tmp_path / 'run' / 'checkpoints' / 'step_1'}\n" in finished.output
    assert ("left out: epoch" in finished.output) == bool(entry)
    step = CheckpointStore(tmp_path / "run" / "checkpoints").folder(1)
    assert verify(step).parts == ["model"]
    ours, theirs = load_file(step / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("files", [1, 3])
def test_older_hugging_face_folders(ckpt, family: str, tmp_path: Path, files: int):
    """pytorch_model.bin, whole or in parts, under the hub's names; what lies in safetensors goes before."""
    folder = make(family, tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"pytorch_model-{n}-of-{files}.bin": list(weights)[n::files] for n in range(files)}
    if files == 1:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        for name, members in parts.items():
            torch.save({member: weights[member] for member in members}, folder / name)
        places = {member: name for name, members in parts.items() for member in members}
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    finished = ckpt("import", folder, tmp_path / "run")
    assert finished.code == 0, finished.output
    step = CheckpointStore(tmp_path / "run" / "checkpoints").folder(1)
    ours = load_file(step / "model" / "model.safetensors")
    assert ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], weights[name]) for name in ours)
    assert not [name for name in names_in(step / "model") if "pytorch" in name]
    if files == 1:
        return
    index.write_text(json.dumps({"weight_map": {**places, "lm_head.weight": "../x.bin"}}))
    finished = ckpt("import", folder, tmp_path / "other")
    assert (finished.code, "outside its folder: '../x.bin'" in finished.output) == (1, True)
    index.write_text(json.dumps({"weight_map": {**places, "model.more": next(iter(parts))}}))
    finished = ckpt("import", folder, tmp_path / "other")
    assert (finished.code, "model.more, which is in none of its files" in finished.output) == (1, True)


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize("legacy", [False, True])
def test_weights_that_lie_in_another_order(
    ckpt, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
):
    """Saved transposed, as parts of one storage, and as parameters; read in pieces; with a flipped bit."""
    monkeypatch.setattr("cairn.checkpoint.tensors.stream_writer.PIECE_BYTES", 4096)
    folder = make(family, tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stored: dict[str, torch.Tensor] = {
        name: tensor.T.contiguous().T if tensor.ndim == 2 else torch.nn.Parameter(tensor)
        for name, tensor in weights.items()
    }
    flat = torch.cat(
        [torch.zeros(3), *(weights[f"model.layers.{n}.mlp.up_proj.weight"].view(-1) for n in (0, 1))]
    )
    for n in (0, 1):
        name = f"model.layers.{n}.mlp.up_proj.weight"
        count = weights[name].numel()
        stored[name] = flat[3 + n * count :][:count].view(weights[name].shape)
    torch.save(stored, folder / "w.pt", _use_new_zipfile_serialization=not legacy)
    assert ckpt("import", folder / "w.pt", tmp_path / "run").code == 0
    step = CheckpointStore(tmp_path / "run" / "checkpoints").folder(1)
    ours = load_file(step / "model" / "model.safetensors")
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
    if legacy:  # such files have no checksums
        return
    data = bytearray((folder / "w.pt").read_bytes())
    data[data.index(flat.numpy().tobytes()) + 20] ^= 1
    (folder / "w.pt").write_bytes(data)
    finished = ckpt("import", folder / "w.pt", tmp_path / "other")
    assert (finished.code, "differs from its checksum" in finished.output) == (1, True), finished.output


class Command:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_is_executed(ckpt, family: str, tmp_path: Path, legacy: bool):
    """The function that it would have called is named, in today's and in the older layout."""
    folder, target = make(family, tmp_path / "hf"), tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    for name, source in (("w.pt", folder / "w.pt"), ("pytorch_model.bin", folder)):
        torch.save({"model": Command(target)}, folder / name, _use_new_zipfile_serialization=not legacy)
        finished = ckpt("import", source, tmp_path / "run")
        assert (finished.code, "system" in finished.output) == (1, True), finished.output
    assert not target.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
def test_absurd_sizes_are_refused(ckpt, family: str, tmp_path: Path):
    """An archive that would unfold, a tensor that repeats one value for ever, and an index that leaves."""
    folder = make(family, tmp_path / "hf")
    with zipfile.ZipFile(folder / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(10**7))
    finished = ckpt("import", folder / "bomb.pt", tmp_path / "run")
    assert (finished.code, "data.pkl is compressed" in finished.output) == (1, True), finished.output
    torch.save({"w": torch.zeros(1).expand(10**12)}, folder / "wide.pt")
    finished = ckpt("import", folder / "wide.pt", tmp_path / "run")
    assert (finished.code, "and 1 values for it" in finished.output) == (1, True), finished.output
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"w": "../../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    finished = ckpt("import", folder, tmp_path / "run")
    assert (finished.code, "outside its folder" in finished.output) == (1, True), finished.output


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
def test_what_is_exported_with_its_state_comes_back(ckpt, step: Path, tmp_path: Path):
    """A step that went out as PyTorch DCP and came in again has the same weights, state and step."""
    assert ckpt("export", step, tmp_path / "out", "--format", "dcp").code == 0
    finished = ckpt("import", tmp_path / "out", tmp_path / "new", "--model", step / "model")
    assert finished.code == 0, finished.output
    assert "has the format dcp" in finished.output
    again = CheckpointStore(tmp_path / "new" / "checkpoints").folder(2)
    assert verify(again).parts == ["trainer"]
    for name in ("model/model.safetensors", "trainer/optimizer.safetensors"):
        ours, theirs = load_file(again / name), load_file(step / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
