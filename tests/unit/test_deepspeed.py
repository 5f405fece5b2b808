"""Checkpoints of DeepSpeed in its layouts, read, written and refused; tests/integration has the program."""

import functools
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_folders import Folder, fragment_address, truth, zero_folder
from families import make, make_config, make_model
from foreign import values
from safetensors.torch import load_file
from test_formats import Command, begun, ckpt, commit, update

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER, StepFolder, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import load_step
from cairn.config.optimizer import AdamWConfig
from cairn.formats import FORMATS, WriteOptions, format_of
from cairn.formats.deepspeed.deepspeed_state import MAX_VALUES
from cairn.formats.transfer.export_step import export
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer

ckpt = ckpt
MODELS = ("llama", "qwen3_tied", "qwen3_moe")
DEEPSPEED = FORMATS["deepspeed"]
SETTINGS = {"optimizer.lr": 1e-2, "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8}
LINEAR = {"scheduler.type": "linear", "scheduler.warmup_steps": 2, "scheduler.steps": 12}


@functools.cache
def trained_of(family: str) -> Trained:
    """A model after two updates; tests leave it as it is."""
    return begun(family)


@pytest.fixture
def llama() -> Trained:
    """A Llama, likewise."""
    return trained_of("llama")


def check(folder: Path, trained: Trained, piece: int = 1 << 20) -> None:
    """See that what is read is what was trained."""
    content = DEEPSPEED.read(folder)
    held = truth(trained)
    tied = trained.module.all_tied_weights_keys.keys()
    buffers = {name for name, _ in trained.module.named_buffers()}
    found = {**content.tensors[MODEL], **content.tensors[OPTIMIZER]}
    assert found.keys() - tied - buffers == held.keys()
    for name, tensor in held.items():
        assert torch.equal(values(found[name], piece), tensor), name
    assert (content.step, content.samples, content.optimizer) == (2, 4, "AdamW")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("family", MODELS)
def test_every_bit_is_read(tmp_path: Path, family: str, stage: int, ranks: int):
    """Of three ranks, parts end within parameters and have padding at the end."""
    trained = trained_of(family)
    folder = zero_folder(trained, stage, ranks).write(tmp_path / "run")
    assert format_of(folder) == format_of(folder / "global_step2") == "deepspeed"
    check(folder, trained)
    check(folder / "global_step2", trained, piece=997)


def test_a_run_goes_on_from_trainers_folder(ckpt, tmp_path: Path):
    """Its checkpoint-2 has the engine's folder inside; the next updates are the source's own."""
    trained = begun("qwen3_moe")
    folder = zero_folder(trained, 2, 2).write(make("qwen3_moe", tmp_path / "checkpoint-2"))
    (folder / "trainer_state.json").write_text('{"global_step": 2, "num_input_tokens_seen": 96}')
    finished = ckpt("import", folder, tmp_path / "run")
    assert finished.code == 0, finished.output
    assert "has the format deepspeed, by its files" in finished.output
    assert "the source's optimizer.lr: 0.01" in finished.output
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    step = store.folder(2)
    assert verify(step).parts == ["trainer"]
    record = StepFolder(step).trainer_state()
    assert record is not None
    assert record.progress == {"step": 2, "total_tokens": 96, "total_samples": 4}
    model = make_model("qwen3_moe", seed=9).train()
    resumed = Trained(model, make_optimizer(model.named_parameters(), AdamWConfig(lr=1e-2)))
    resumed.create_optimizer_state(StepFolder(step).tensors(OPTIMIZER))
    load_step(step, {**resumed.tensors(), MODEL: resumed.loaded(step / "model")})
    for _ in range(2):
        assert update(resumed) == update(trained)


def saved(trained: Trained, family: str, folder: Path, **more: object) -> Path:
    """The step that a run of Cairn saves."""
    store = CheckpointStore(folder / "old" / "checkpoints")
    return commit(trained, store, 2, make(family, folder / "hf"), {**SETTINGS, **more})


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_an_export_comes_back(ckpt, tmp_path: Path, family: str):
    """As a universal checkpoint, without DeepSpeed's classes in its files, beside the tokenizer."""
    trained = trained_of(family)
    step = saved(trained, family, tmp_path)
    out = tmp_path / "out"
    finished = ckpt("export", step, out, "--format", "deepspeed")
    assert finished.code == 0, finished.output
    assert "read back and equal" in finished.output
    assert (out / "latest_universal").read_text() == "global_step2"
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2
    assert torch.load(out / "scheduler.pt", weights_only=True)["last_epoch"] == 2
    held = truth(trained)
    for path in out.rglob("*.pt"):
        found = torch.load(path, weights_only=True)
        if path.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            name = path.parent.name + ("" if path.stem == "fp32" else f".{path.stem}")
            assert torch.equal(found["param"], held[name]), path
    finished = ckpt("import", out, tmp_path / "new")
    assert finished.code == 0, finished.output
    again = CheckpointStore(tmp_path / "new" / "checkpoints").folder(2)
    assert verify(again).parts == ["trainer"]
    for name in ("model/model.safetensors", "trainer/optimizer.safetensors"):
        ours, theirs = load_file(again / name), load_file(step / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_export_names_the_rate_of_the_next_step(ckpt, tmp_path: Path, llama: Trained):
    """DeepSpeed's optimiser takes it as it is: schedules set the one after it."""
    step = saved(llama, "llama", tmp_path, **LINEAR)
    assert ckpt("export", step, tmp_path / "out", "--format", "deepspeed").code == 0
    inner = tmp_path / "out" / "global_step2"
    common = torch.load(inner / "zero" / "optimizer_state.pt", weights_only=True)
    for groups in (common["param_groups"], common["optimizer_state_dict"]["param_groups"]):
        assert groups[0]["lr"] == pytest.approx(0.9e-2)
        assert "weight_decay" not in groups[0]
    state = torch.load(inner / "mp_rank_00_model_states.pt", weights_only=True)
    assert (state["global_steps"], state["lr_scheduler"]["last_epoch"]) == (2, 2)


def test_an_export_of_half_precision_is_refused(ckpt, tmp_path: Path):
    """DeepSpeed's masters are float32."""
    step = saved(trained_of("llama"), "llama", tmp_path)
    refused = ckpt("export", step, tmp_path / "out", "--format", "deepspeed", "--dtype", "bfloat16")
    assert (refused.code, "checkpoints hold float32 (say" in refused.output) == (1, True)
    assert not (tmp_path / "out").exists()


def test_buffers_are_not_exported(ckpt, tmp_path: Path):
    """DeepSpeed would leave those of its program as they are."""
    step = saved(begun("deepseek_v3"), "deepseek_v3", tmp_path)
    refused = ckpt("export", step, tmp_path / "out", "--format", "deepspeed")
    assert (refused.code, "these are buffers or not trained: model" in refused.output) == (1, True), (
        refused.output
    )


# Other layouts


def as_bf16_optimizer(folder: Folder) -> None:
    """Of BF16_Optimizer, which keeps the padding and has no stage."""
    for rank in range(3):
        held = folder.optim(rank)
        flat = held["single_partition_of_fp32_groups"]
        for number, padding in enumerate(held["group_paddings"]):
            flat[number] = torch.nn.functional.pad(flat[number], (0, padding))
        del held["zero_stage"], held["loss_scaler"]
    for name in [name for name in folder.files if "optim" in name]:
        folder.files[f"bf16_{name}"] = folder.files.pop(name)


def as_elastic(folder: Folder) -> None:
    """With `elastic_checkpoint`: a list of states without padding."""
    for rank in range(3):
        held = folder.optim(rank)
        states = held["base_optimizer_state"]["state"]
        lean = [len(flat) for flat in held["single_partition_of_fp32_groups"]]
        held["base_optimizer_state"] = [
            {key: value[: lean[number]] if value.ndim else value for key, value in states[number].items()}
            for number in range(len(lean))
        ]


def as_fused_adam(folder: Folder) -> None:
    """DeepSpeed's own Adam counts steps as a number of the group, or of the state."""
    for rank in range(3):
        held = folder.optim(rank)["base_optimizer_state"]
        for number, state in held["state"].items():
            del state["step"]
            if number:
                state["step"] = 2
            else:
                held["param_groups"][0]["step"] = 2


def as_old(folder: Folder) -> None:
    """Before there were addresses and gaps."""
    for rank in range(3):
        held = folder.optim(rank)
        del held["param_slice_mappings"], held["param_alignment_paddings"]
    del folder.model()["checkpoint_parallel_dimensions"]


@pytest.mark.parametrize("change", [as_bf16_optimizer, as_elastic, as_fused_adam, as_old])
def test_other_ways_to_store_the_state(tmp_path: Path, llama: Trained, change: Callable[[Folder], None]):
    """Each is read in full."""
    folder = zero_folder(llama, 1, 3)
    change(folder)
    check(folder.write(tmp_path), llama)


def test_gaps_between_parameters(tmp_path: Path, llama: Trained):
    """As DeepSpeed leaves them to align parameters."""
    check(zero_folder(llama, 2, 3, aligned=48).write(tmp_path), llama)


def test_parameters_that_are_not_trained(tmp_path: Path, llama: Trained):
    """Their values are beside the partitions: cut for the ranks with ZeRO 3, else whole."""
    name = "model.embed_tokens.weight"
    held = llama.module.get_input_embeddings().weight.detach()
    for stage in (1, 2, 3):
        folder = zero_folder(llama, stage, 2)
        parts = torch.nn.functional.pad(held.reshape(-1), (0, held.numel() % 2)).chunk(2)
        states = [file for path, file in folder.files.items() if "model" in path]
        for state, part in zip(states, parts, strict=False):
            if stage > 1:
                state["frozen_param_shapes"]["more"] = held.shape
                state["frozen_param_fragments"]["more"] = part.clone() if stage == 3 else held
            else:
                state["module"]["more"] = held
        content = DEEPSPEED.read(folder.write(tmp_path / str(stage)))
        assert torch.equal(values(content.tensors[MODEL]["more"], 501), held)
        assert torch.equal(values(content.tensors[MODEL][name]), held)
        assert "more.exp_avg" not in content.tensors[OPTIMIZER]


def test_the_weights_of_a_folder_without_zero(tmp_path: Path, llama: Trained):
    """They are in the engine's file as a state dict, which is a format of its own."""
    folder = zero_folder(llama, 1, 1)
    folder.model()["param_shapes"] = None
    file = folder.write(tmp_path) / "global_step2" / "mp_rank_00_model_states.pt"
    weights = FORMATS["pt"].read(file).tensors[MODEL]
    held = llama.module.state_dict()
    assert weights.keys() == held.keys()
    assert all(torch.equal(values(weights[name]), tensor) for name, tensor in held.items())


# What is refused


def set_field(where: str, key: str, value: Any) -> Callable[[Folder], None]:
    """A change of a field of the first rank's `model` or `optim` file."""

    def change(folder: Folder) -> None:
        getattr(folder, where)()[key] = value

    return change


def moved(folder: Folder) -> None:
    """A rank says that a parameter is elsewhere."""
    folder.optim(0)["param_slice_mappings"][1]["model.embed_tokens.weight"] = fragment_address(5, 1)


def too_short(folder: Folder) -> None:
    """A partition lacks values."""
    flat = folder.optim(1)["single_partition_of_fp32_groups"]
    flat[0] = flat[0][:-2].clone()


def left_over(folder: Folder) -> None:
    """The partitions hold a parameter that is not listed."""
    folder.model()["param_shapes"][0].popitem()
    for rank in range(2):
        for key in ("param_slice_mappings", "param_alignment_paddings"):
            del folder.optim(rank)[key]


def other_step(folder: Folder) -> None:
    """A rank's file is of an older checkpoint."""
    for state in folder.optim(1)["base_optimizer_state"]["state"].values():
        state["step"] = torch.tensor(1.0)


def missing_rank(folder: Folder) -> None:
    """A rank's file was lost."""
    del folder.files["zero_pp_rank_1_mp_rank_00_optim_states.pt"]


def old_ranks(folder: Folder) -> None:
    """Two more ranks of an older run."""
    for rank in (2, 3):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        folder.files[name] = folder.files["zero_pp_rank_1_mp_rank_00_optim_states.pt"]


def momentum(folder: Folder) -> None:
    """SGD."""
    for rank in range(2):
        for state in folder.optim(rank)["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
            del state["exp_avg_sq"], state["step"]


def l2(folder: Folder) -> None:
    """Adam with L2 decay."""
    for rank in range(2):
        for own in folder.optim(rank)["base_optimizer_state"]["param_groups"]:
            own.update(weight_decay=0.1, decoupled_weight_decay=False)


def lora(folder: Folder) -> None:
    """An adapter's weight."""
    shapes = folder.model()["param_shapes"][0]
    shapes["base_model.model.q_proj.lora_A.default.weight"] = shapes.popitem()[1]


def renamed(old: str, new: str) -> Callable[[Folder], None]:
    """Another file name."""

    def change(folder: Folder) -> None:
        folder.files[new] = folder.files.pop(old) if old else {}

    return change


SECOND = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
REFUSED = [
    (set_field("model", "mp_world_size", 2), "has tensor parallelism over 2 ranks"),
    (
        set_field("model", "checkpoint_parallel_dimensions", {"pp_degree": 4}),
        "has pipeline parallelism over 4 ranks",
    ),
    (set_field("model", "num_experts", [8]), "DeepSpeed's expert parallelism"),
    (set_field("optim", "partition_count", [2, 1]), r"groups have \[2, 1\] ranks"),
    (set_field("optim", "zero_stage", 3), "says ZeRO 3"),
    (set_field("optim", "group_paddings", [4, 0]), "something is missing or left over"),
    (set_field("optim", "param_alignment_paddings", [[1], []]), "param_alignment_paddings is not that of"),
    (set_field("model", "global_steps", None), "not a model state of DeepSpeed"),
    (set_field("model", "param_shapes", None), "was saved without ZeRO.*--format pt"),
    (set_field("model", "param_shapes", [{"w": torch.Size([MAX_VALUES, 2])}]), "absurd shape"),
    (set_field("model", "param_shapes", [{"w": torch.Size([1 << 40])}]), "lists 1 groups of 3"),
    (set_field("optim", "single_partition_of_fp32_groups", [torch.ones(2, 2)]), "is no flat tensor"),
    (renamed(SECOND, "zero_pp_rank_1_mp_rank_01_optim_states.pt"), "is of tensor parallelism"),
    (renamed(SECOND, f"bf16_{SECOND}".replace("rank_1", "rank_0")), "of another run"),
    (renamed("", "layer_0_expert_0_mp_rank_00_model_states.pt"), "expert or pipeline parallelism"),
    (moved, "has model.embed_tokens.weight at"),
    (too_short, "group 0 has .* values"),
    (left_over, "something is missing or left over"),
    (other_step, "another step or run"),
    (missing_rank, "of 1 of 2 ranks"),
    (old_ranks, "files of an older run are among them"),
    (momentum, "has momentum_buffer, not the state of AdamW"),
    (l2, "Adam with L2 decay"),
    (lora, "LoRA adapters"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_is_refused(tmp_path: Path, llama: Trained, change: Callable[[Folder], None], said: str):
    """With its reason."""
    folder = zero_folder(llama, 2, 2)
    change(folder)
    with pytest.raises((CheckpointError, FileNotFoundError), match=said):
        DEEPSPEED.read(folder.write(tmp_path))


def test_partitions_of_zero_3_must_fit(tmp_path: Path, llama: Trained):
    """A value too few, and a rank without its model's state."""
    folder = zero_folder(llama, 3, 2)
    flat = folder.optim(1)["fp32_flat_groups"]
    flat[0] = flat[0].detach()[1:].clone()
    with pytest.raises(Damaged, match=r"its parameters have .* on each of 2 ranks"):
        DEEPSPEED.read(folder.write(tmp_path / "a"))
    folder = zero_folder(llama, 3, 2)
    del folder.files["zero_pp_rank_1_mp_rank_00_model_states.pt"]
    with pytest.raises(Damaged, match="of 2 ranks"):
        DEEPSPEED.read(folder.write(tmp_path / "b"))


# Hostile files


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", SECOND])
def test_nothing_in_the_files_is_executed(ckpt, tmp_path: Path, llama: Trained, name: str):
    """The function that it would have called is named."""
    folder = zero_folder(llama, 2, 2)
    folder.files[name]["client"] = Command(tmp_path / "executed")
    source = folder.write(make("llama", tmp_path / "source"))
    finished = ckpt("import", source, tmp_path / "run")
    assert (finished.code, f"names {os.system.__module__}.system" in finished.output) == (1, True), (
        finished.output
    )
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run").exists()


def test_latest_stays_in_its_folder(tmp_path: Path, llama: Trained):
    """A name that leads elsewhere is not followed."""
    source = zero_folder(llama, 2, 1).write(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "latest").write_text("../a/global_step2")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint of DeepSpeed"):
        DEEPSPEED.read(tmp_path / "b")
    (source / "latest").write_text("../a/global_step2")
    with pytest.raises(Damaged, match="which is no folder beside it"):
        DEEPSPEED.read(source)
    (source / "latest").write_bytes(b"\xff" * 10**6)
    assert format_of(source) is None


def test_a_partition_that_is_larger_than_its_file(tmp_path: Path, llama: Trained):
    """Its storage would have to be read beyond the file's end, or is compressed."""
    folder = zero_folder(llama, 2, 2).write(tmp_path / "a")
    path = folder / "global_step2" / SECOND
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for kind, said in ((zipfile.ZIP_STORED, "has 8 bytes"), (zipfile.ZIP_DEFLATED, "is compressed")):
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, data in entries.items():
                archive.writestr(name, data[:8] if name.endswith("/data/1") else data)
        with pytest.raises(Damaged, match=said):
            DEEPSPEED.read(folder)


def test_a_flipped_bit_is_found(tmp_path: Path, llama: Trained):
    """By the CRC-32 that torch wrote, before a value of the partition is given out."""
    folder = zero_folder(llama, 2, 2).write(tmp_path)
    path = folder / "global_step2" / SECOND
    tensor = DEEPSPEED.read(folder).tensors[MODEL]["lm_head.weight"]
    data = bytearray(path.read_bytes())
    at = data.find(values(tensor)[-1].numpy().tobytes())
    assert at > 0
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="differs from its checksum"):
        values(DEEPSPEED.read(folder).tensors[MODEL]["lm_head.weight"])


def test_universal_checkpoints_that_are_refused(tmp_path: Path, llama: Trained):
    """Missing files, other sizes, experts, and flat tensors that a model's state gives their shape."""
    out = tmp_path / "out"
    export(saved(llama, "llama", tmp_path), out, "deepspeed", WriteOptions(), check=False)
    zero = out / "global_step2" / "zero"
    own = zero / "model.norm.weight"
    held = torch.load(own / "fp32.pt", weights_only=True)["param"]
    config = make_config("llama")
    for content, said in (
        (torch.ones(3), "has shape"),
        ({"param": torch.ones(config.hidden_size // 2, 2)}, "has shape"),
        ({"param": held, "is_expert_param": True}, "expert parallelism"),
        ({}, "is no tensor"),
    ):
        torch.save(content, own / "fp32.pt")
        with pytest.raises(CheckpointError, match=said):
            DEEPSPEED.read(out)
    embeddings = zero / "model.embed_tokens.weight" / "exp_avg.pt"
    flat = torch.load(embeddings, weights_only=True)["param"].view(-1)
    torch.save(flat, embeddings)
    torch.save({"param": held}, own / "fp32.pt")
    check(out, llama)
    (own / "exp_avg.pt").unlink()
    with pytest.raises(CheckpointError, match="has exp_avg_sq, step, not the state of AdamW"):
        DEEPSPEED.read(out)
    (own / "fp32.pt").unlink()
    with pytest.raises(FileNotFoundError):
        DEEPSPEED.read(out)
