"""Low-rank adapters: what they compute, what a step of them holds, and what is refused."""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make
from one_rank import one_rank
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from runs import ABOUT
from safetensors.torch import load_file, save_file
from tiny import write_example
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cairn.checkpoint.fork import store_of_copies
from cairn.checkpoint.manifest import CheckpointError, Damaged, check_files, load_manifest
from cairn.checkpoint.saving.arena import SaveFailed
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.step_folder import MODEL, TRAINER_STATE, TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.placement import Stored, share_of
from cairn.checkpoint.tensors.sharded_files import read_tensor, write_tensors
from cairn.config.model import LoraConfig, PrecisionConfig
from cairn.config.optimizer import AdamWConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.formats import FORMATS, WriteOptions
from cairn.formats.transfer.export_step import export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.inference.plugin.adapters import AdapterCopies
from cairn.inference.plugin.policy_source import Merging
from cairn.launch.plan.recipe import check_adapter
from cairn.launch.start import Start
from cairn.model.hub_layout import hub_layout
from cairn.policy.checksums import write_checksums
from cairn.run.errors import UsageError
from cairn.run.output import no_progress
from cairn.trainer.group import RankGroup
from cairn.trainer.models.adapter import Adapter, make_policy
from cairn.trainer.models.model import companions
from cairn.trainer.publishing.transports import FileTransport, Served
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState

group = one_rank
TOKENS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_example(tmp_path_factory.mktemp("base"))


def config_with(**lora: object) -> SFTConfig:
    """Settings of a run with an adapter."""
    return SFTConfig(lora=LoraConfig.model_validate({"rank": 4, **lora}), optimizer=AdamWConfig(lr=1e-2))


def state_of(base: Path, group: RankGroup, config: SFTConfig) -> TrainerState:
    """A trainer whose adapter has no values yet."""
    return TrainerState(config, group, {POLICY: make_policy(base, config, group)}, TrainerProgress())


def descend(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The losses of some optimiser steps on TOKENS."""
    losses = []
    for _ in range(steps):
        loss = module(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(state: TrainerState, step: int, root: Path, parent: Path | None = None) -> Path:
    """A step as a trainer saves it; returns its folder."""
    state.progress.step = step
    store = CheckpointStore(root)
    policy = state.policy
    assert isinstance(policy, Adapter)
    how = SaveOptions(carried=policy.carried(), parent=parent)
    saver = Saver(store, SavingRank(0, 1, "0" * 16), roles={}, how=how)
    record = TrainerRecord(progress=asdict(state.progress), optimizer="AdamW", recipe={"settings": {}})
    beginning = parent / "model" if parent and parent.exists() else Path(policy.base.folder)
    beside = {**companions(policy.module, beginning), **policy.beside()}
    files = {f"model/{name}": content for name, content in beside.items()} | {TRAINER_STATE: record.to_json()}
    with contextlib.closing(saver):
        saver.save(step, state.tensors(), files, ABOUT)
        saver.finish()
    return store.folder(step)


def learned(
    base: Path, group: RankGroup, root: Path, steps: int = 3, **lora: object
) -> tuple[TrainerState, Path]:
    """A trainer after some steps, and the last of them, saved."""
    state = state_of(base, group, config_with(**lora))
    state.begin(base)
    descend(state.policy.module, state.policy.optimizer, steps)
    return state, save(state, steps, root)


def original(base: Path) -> PreTrainedModel:
    """The base as transformers opens it."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def test_it_learns_as_peft_does(base: Path, group: RankGroup, tmp_path: Path):
    """PEFT's own model, from the same values, has the same losses; and it opens what is saved."""
    ours, start = learned(base, group, tmp_path / "start", steps=1)
    theirs = PeftModel.from_pretrained(original(base), start / "model", is_trainable=True).train()
    policy = ours.policy
    prefix = "base_model.model."
    assert policy.trained().keys() == {
        name.removeprefix(prefix) for name, p in theirs.named_parameters() if p.requires_grad
    }
    decay = ours.config.optimizer.weight_decay
    of_peft = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=decay
    )
    policy.optimizer.state.clear()
    expected = descend(theirs, of_peft, 6)
    assert descend(policy.module, policy.optimizer, 6) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < 0.8 * expected[0]

    opened = PeftModel.from_pretrained(original(base), save(ours, 7, tmp_path / "end") / "model").eval()
    with torch.no_grad():
        assert torch.equal(opened(TOKENS).logits, policy.module.eval()(TOKENS).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_servers_get_merged_weights(tied: bool, group: RankGroup, tmp_path: Path):
    """They are those of PEFT's merge, made when they leave: no copy of the base is kept for them."""
    base = write_example(tmp_path / "base", tied=tied)
    kept = ["model.norm"] if tied else ["lm_head", "layers.0.input_layernorm"]
    targets = ["q_proj", "up_proj"]
    state, step = learned(base, group, tmp_path / "run", rslora=True, modules_to_save=kept, targets=targets)
    served = state.policy.served()
    first = as_sent(served, tmp_path / "first")
    merged = PeftModel.from_pretrained(original(base), step / "model").merge_and_unload().state_dict()
    was = load_file(base / "model.safetensors")
    assert first.keys() == was.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)
    changed = {name.split(".")[-2] for name in was if not torch.equal(first[name], was[name])}
    assert changed == {*targets, *(name.rpartition(".")[2] for name in kept)}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert state.policy.served()[name].numel() == first[name].numel()
    with pytest.raises(RuntimeError, match="meta"):
        share_of(name, served[name], 0).local.sum().item()
    descend(state.policy.module, state.policy.optimizer, 1)
    state.policy.served()
    assert not torch.equal(as_sent(served, tmp_path / "second")[name], first[name])


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32], ids=str)
def test_a_base_is_held_as_it_is_computed_with(held: torch.dtype, group: RankGroup, tmp_path: Path):
    """So it takes half the memory on a GPU. Where its files are in that type, servers get the same bits."""
    base = tmp_path / "base"
    write_example(base)
    was = {name: tensor.to(held) for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(was, base / "model.safetensors", {"format": "pt"})
    config = config_with(targets=["q_proj"]).model_copy(
        update={"precision": PrecisionConfig(compute="bfloat16", reduce="float32")}
    )
    state = state_of(base, group, config)
    state.begin(base)
    descend(state.policy.module, state.policy.optimizer, 2)
    for name, parameter in state.policy.module.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    sent = as_sent(state.policy.served(), tmp_path / "sent")
    for name, layer in state.policy._layers():
        change = layer.scaling["default"] * (plain(layer.lora_B) @ plain(layer.lora_A))
        expected = was[f"{name}.weight"].bfloat16().float() + change
        torch.testing.assert_close(sent[f"{name}.weight"], expected, rtol=1e-6, atol=1e-6)
        assert change.abs().max() > 0


def plain(matrix: Any) -> torch.Tensor:
    weight = matrix["default"].weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def as_sent(served: Mapping[str, Stored], folder: Path) -> dict[str, torch.Tensor]:
    """What servers get, in files."""
    folder.mkdir()
    write_tensors(folder, served, "model")
    return load_file(folder / "model.safetensors")


def test_a_resumed_run_has_the_same_bits(base: Path, group: RankGroup, tmp_path: Path):
    """Adapter and optimiser state come from the step, the base from where it was."""
    straight, step = learned(base, group, tmp_path / "run")
    expected = descend(straight.policy.module, straight.policy.optimizer, 3)
    resumed = state_of(step / "model", group, straight.config)
    resumed.load(step)
    assert descend(resumed.policy.module, resumed.policy.optimizer, 3) == expected
    for name, tensor in straight.policy.trained().items():
        assert torch.equal(resumed.policy.trained()[name], tensor)
    saved = load_file(step / "model" / "adapter_model.safetensors")
    assert resumed.policy.saved().keys() == saved.keys()
    whole = 3 * (base / "model.safetensors").stat().st_size  # weights and two moments
    assert sum(file.stat().st_size for file in step.rglob("*.safetensors")) < 0.1 * whole


def test_another_base_is_refused_by_name(base: Path, group: RankGroup, tmp_path: Path):
    """One of the same shape, one that is gone, and one that moved."""
    near = write_example(tmp_path / "near")
    state, step = learned(near, group, tmp_path / "run")
    write_example(near, seed=1)
    with pytest.raises(
        CheckpointError, match=r"near is not the base of the adapter .* other contents of model"
    ):
        state_of(step / "model", group, state.config)
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="near is not the base of the adapter"):
        export(step, out, "hf", WriteOptions())
    assert not out.exists()
    shutil.rmtree(near)
    with pytest.raises(CheckpointError, match=r"no longer in .*near; put it back, or .* --lora.base FOLDER"):
        state_of(step / "model", group, state.config)
    moved = config_with(base=str(base))  # the same seed, so the same weights
    state_of(step / "model", group, moved).load(step)


@pytest.mark.slow
def test_steps_can_hold_the_base(base: Path, group: RankGroup, tmp_path: Path):
    """Once, for all of them; with the source gone a run goes on from it, and so does everything else."""
    source, root = tmp_path / "source", tmp_path / "run"
    shutil.copytree(base, source)
    state, first = learned(source, group, root, save_base=True)
    second = save(state, 4, root, parent=first)
    manifest = load_manifest(second)
    held = {name: second / name for name in manifest.files if name.startswith("base/")}
    assert {path.name for path in held.values()} == {path.name for path in source.iterdir()}
    for name, path in held.items():
        assert path.read_bytes() == (source / path.name).read_bytes()
        assert path.stat().st_ino == (first / name).stat().st_ino
        assert path.stat().st_ino != (source / path.name).stat().st_ino
    shutil.rmtree(source)
    shutil.rmtree(first)
    check_files(second, manifest)
    resumed = state_of(second / "model", group, config_with(save_base=True))
    resumed.load(second)
    expected = descend(state.policy.module, state.policy.optimizer, 2)
    assert descend(resumed.policy.module, resumed.policy.optimizer, 2) == expected
    third = save(resumed, 6, root, parent=second)
    for name, path in held.items():
        assert (third / name).stat().st_ino == path.stat().st_ino

    copies = store_of_copies(tmp_path / "moved" / "checkpoints")
    moved = Path(copies.take(third, "moved", stage=no_progress))
    export(moved, tmp_path / "out", "hf", WriteOptions())
    plain = AutoModelForCausalLM.from_pretrained(moved / "base", dtype=torch.float32)
    opened = PeftModel.from_pretrained(plain, moved / "model").eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = resumed.policy.module.eval()(TOKENS).logits
        assert torch.equal(opened(TOKENS).logits, logits)
        torch.testing.assert_close(whole(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)

    start = Start(CheckpointStore(root), third, load_manifest(third))
    check_adapter(LoraConfig(rank=4, save_base=True), start, "--")
    with pytest.raises(UsageError, match=r"no longer in .*source.* that the step holds: --lora.save-base"):
        check_adapter(LoraConfig(rank=4), start, "--")
    (third / "base" / "config.json").write_text("{}")
    with pytest.raises(Damaged, match=r"base/config.json"):
        check_files(third, load_manifest(third))


def test_a_base_that_changed_is_not_saved(base: Path, group: RankGroup, tmp_path: Path):
    """A step never holds a base that is not the one that was trained with."""
    source = tmp_path / "source"
    shutil.copytree(base, source)
    state, _ = learned(source, group, tmp_path / "run", save_base=True)
    weights = bytearray((source / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (source / "model.safetensors").write_bytes(weights)
    with pytest.raises(SaveFailed, match=r"model.safetensors: is not what it was when the run read it"):
        save(state, 4, tmp_path / "other")
    assert not (tmp_path / "other" / "step_4" / "manifest.json").exists()


@pytest.mark.slow
def test_exports_hold_the_merged_model_or_the_adapter(base: Path, group: RankGroup, tmp_path: Path):
    """Transformers opens the one, PEFT the other, and both give the trainer's logits."""
    state, step = learned(base, group, tmp_path / "run")
    with torch.no_grad():
        expected = state.policy.module.eval()(TOKENS).logits
        for name in ("hf", "peft"):
            export(step, tmp_path / name, name, WriteOptions())
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        assert not (tmp_path / "hf" / "adapter_config.json").exists()
        adapter = PeftModel.from_pretrained(original(base), tmp_path / "peft").eval()
        assert torch.equal(adapter(TOKENS).logits, expected)

    _, _, content = import_checkpoint(tmp_path / "peft", tmp_path / "imported", "peft")
    assert content.model == base
    whole = tmp_path / "imported" / "checkpoints" / "step_1"
    again = load_file(whole / "model" / "model.safetensors")
    served = load_file(tmp_path / "hf" / "model.safetensors")
    assert again.keys() == served.keys()
    assert all(torch.equal(again[name], served[name]) for name in served)
    with pytest.raises(
        CheckpointError, match=r"trained without \[lora\], so there is no adapter; --format hf"
    ):
        export(whole, tmp_path / "none", "peft", WriteOptions())


def test_an_adapter_of_another_program_is_merged_as_peft_does(base: Path, tmp_path: Path):
    """One with ranks of its own, in any parts; and one whose merge is more than a product is refused."""
    about = {
        "r": 4,
        "lora_alpha": 3,
        "target_modules": ["v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2},
    }
    model = get_peft_model(original(base), PeftConfig(**about, init_lora_weights=False))
    model.save_pretrained(tmp_path / "plain")
    content = FORMATS["peft"].read(tmp_path / "plain", base)
    expected = model.merge_and_unload().state_dict()
    for name, source in content.tensors[MODEL].items():
        whole = read_tensor(source)
        torch.testing.assert_close(whole, expected[name], rtol=1e-6, atol=1e-6)
        part = torch.empty(whole.numel() // 2)
        source.fill(whole.numel() // 3, part)
        assert torch.equal(part, whole.view(-1)[whole.numel() // 3 :][: len(part)])

    get_peft_model(original(base), PeftConfig(**about, use_dora=True)).save_pretrained(tmp_path / "dora")
    with pytest.raises(CheckpointError, match="use_dora = True; PEFT's merge_and_unload can do that"):
        FORMATS["peft"].read(tmp_path / "dora", base)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"targets": ["experts"]},
            r"'experts' matches no linear layer of Qwen3ForCaus.* There are: down_proj, g",
        ),
        ({"targets": ["lm_head"]}, "it is the head, which can be trained in full: lora.modules_to_save"),
        ({"targets": ["embed_tokens"]}, r"model.embed_tokens.weight is not of a linear layer"),
        (
            {"modules_to_save": ["nothing"]},
            r"'nothing' matches no module of Qwen3ForCausalLM. There are: .*mlp",
        ),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight is tied to another module's weight"),
        (
            {"modules_to_save": ["layers.1.mlp"]},
            r"1.mlp.gate_proj is trained in full with it, and has an adapter",
        ),
    ],
)
def test_what_a_model_has_no_adapter_for_is_refused(base: Path, group: RankGroup, lora: dict, message: str):
    """With what there is."""
    with pytest.raises(UsageError, match=message):
        make_policy(base, config_with(**lora), group)


def test_layers_that_a_kernel_reads_past_the_adapter_are_refused(group: RankGroup, tmp_path: Path):
    """PEFT knows them."""
    folder = make("falcon_h1", tmp_path)
    with pytest.raises(UsageError, match=r"PEFT refuses FalconH1ForCausalLM: .*out_proj"):
        make_policy(folder, config_with(), group)
    make_policy(folder, config_with(targets=["q_proj"]), group)


def test_wrong_settings_are_refused():
    """Before a model is there."""
    with pytest.raises(ValueError, match="an adapter's base is frozen already"):
        SFTConfig(lora=LoraConfig(), freeze=["model.norm.*"])
    with pytest.raises(ValueError, match="all-linear stands for all of them"):
        LoraConfig(targets=["all-linear", "q_proj"])
    with pytest.raises(ValueError, match=r'modules_to_save = .*"adapter" and "merged" serve whole modules'):
        LoraConfig(serve="unmerged", modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="rank 512 at most"):
        LoraConfig(serve="unmerged", rank=513)
    for serve in ("adapter", "unmerged"):
        with pytest.raises(ValueError, match=f'"{serve}" needs weight_transport = "files"'):
            TrainerConfig(lora=LoraConfig(serve=serve), weight_transport="network")


def test_first_values_depend_on_the_seed_and_the_name_alone(base: Path, group: RankGroup):
    """Not on the other targets."""
    name = "model.layers.1.self_attn.q_proj.lora_A.default.weight"

    def first(**lora: object) -> torch.Tensor:
        policy = make_policy(base, config_with(**lora), group)
        policy.begin(base)
        return policy.trained()[name].detach()

    assert torch.equal(first(), first(targets=["q_proj"]))
    assert first().abs().max() <= 128**-0.5
    assert first().std() > 0.5 * 128**-0.5


def names_of_layers(module: torch.nn.Module) -> list[str]:
    """Those that have an adapter."""
    return [name for name, _ in module.named_parameters() if ".lora_A." in name]


def test_a_version_is_the_adapter_or_the_merged_model(base: Path, group: RankGroup, tmp_path: Path):
    """In the folder of another kind of version, too, of which nothing is left; both are the same weights."""
    folder, found = tmp_path / "version", {}
    folder.mkdir()
    for serve in ("merged", "adapter", "unmerged", "merged"):
        config = TrainerConfig(lora=LoraConfig(rank=4, serve=serve), optimizer=AdamWConfig(lr=1e-2))
        policy = make_policy(base, config, group)
        policy.begin(base)
        descend(policy.module, policy.optimizer, 2)
        dtype = torch.float32
        served = Served(
            policy.served,
            policy.served_as(dtype),
            policy.served_with(dtype),
            saved=policy.saves_served,
            stem=policy.served_stem,
        )
        transport = FileTransport(group, served)
        filling = transport.take(2, last=False)
        filling.begin(folder)
        write_checksums(folder, filling.write(folder, lambda: None).sums)
        transport.close()
        names = {path.name for path in folder.iterdir()}
        if serve == "adapter":
            assert "model.safetensors" not in names
            layout = hub_layout(AutoConfig.from_pretrained(base))
            sources = Merging(str(base)).sources(folder, layout)
            found[serve] = {name: read_tensor(source) for name, source in sources.items()}
        elif serve == "unmerged":
            copy = AdapterCopies(str(base), dtype, 4, tmp_path / "copies").add(str(folder))
            opened = PeftModel.from_pretrained(original(base), copy.folder).merge_and_unload().state_dict()
            for name, tensor in found["adapter"].items():
                torch.testing.assert_close(tensor, opened[name], rtol=1e-6, atol=1e-6)
            assert len(copy.modules) == len(names_of_layers(policy.module))
        else:
            assert names.isdisjoint({"adapter_model.safetensors", "adapter_config.json", "cairn_base.json"})
            found[serve] = load_file(folder / "model.safetensors")
    assert found["adapter"].keys() == found["merged"].keys()
    for name, tensor in found["merged"].items():
        torch.testing.assert_close(found["adapter"][name], tensor, rtol=1e-6, atol=1e-6)
