"""Checkpoints in Megatron's layout, written by torch's DCP; those of megatron-core itself are in
tests/integration/test_megatron_core.py.
"""

import argparse
import enum
import itertools
import json
import os
import pickle
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from families import FAMILIES, make
from safetensors.torch import load_file
from test_formats import ckpt
from tiny import random_model, write
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from transformers import AutoConfig

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.sharded_files import read_tensor
from cairn.formats import FORMATS, format_of
from cairn.formats.megatron.megatron_names import ABOUT, IN_LAYERS, LATEST, OUTSIDE, Key, parse
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle

ckpt = ckpt
HEADS, KEYS, HEAD, LAYERS, EXPERTS = 4, 2, 32, 2, 4
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": KEYS, "head_dim": HEAD}
PADDED = 112
MODELS = ("llama", "qwen2", "qwen3_tied", "qwen3_moe")


@pytest.fixture(scope="module", params=MODELS)
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the hub, of 4 heads in 2 groups."""
    return make_hub(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a Llama in Megatron's format, with AdamW's state and its config.json."""
    folder = make_hub("llama", tmp_path / "llama")
    for place in ("model.safetensors", "generation_config.json"):
        (folder / place).rename(tmp_path / place)
    weights = load_file(tmp_path / "model.safetensors")
    write_folder(folder, weights)
    return folder


def make_hub(family: str, folder: Path) -> Path:
    settings = {**FAMILIES[family].settings, **SIZES}
    return write(random_model(AutoConfig.for_model(FAMILIES[family].model_type, **settings), 3), folder)


def to_megatron(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's tensors of a model."""

    def layers(make: str) -> torch.Tensor:
        return torch.stack([weights[make.format(i)] for i in range(LAYERS)])

    def joined(names: list[str]) -> torch.Tensor:
        return torch.cat([layers(f"model.layers.{{}}.{name}") for name in names], 1)

    def groups(kind: str) -> torch.Tensor:
        q, k, v = (layers(f"model.layers.{{}}.self_attn.{name}_proj.{kind}") for name in "qkv")
        each = [
            torch.cat(
                [q[:, g * 2 * HEAD : (g + 1) * 2 * HEAD], *(t[:, g * HEAD : (g + 1) * HEAD] for t in (k, v))],
                1,
            )
            for g in range(KEYS)
        ]
        return torch.cat(each, 1)

    def padded(name: str) -> torch.Tensor:
        return torch.nn.functional.pad(weights[name], (0, 0, 0, PADDED - len(weights[name])), value=9.0)

    block = "decoder.layers."
    found = {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        f"{block}self_attention.linear_qkv.layer_norm_weight": joined(["input_layernorm.weight"]),
        f"{block}self_attention.linear_qkv.weight": groups("weight"),
        f"{block}self_attention.linear_proj.weight": joined(["self_attn.o_proj.weight"]),
        f"{block}pre_mlp_layernorm.weight": joined(["post_attention_layernorm.weight"]),
    }
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = padded("lm_head.weight")
    if "model.layers.0.self_attn.q_proj.bias" in weights:
        found[f"{block}self_attention.linear_qkv.bias"] = groups("bias")
    if "model.layers.0.self_attn.q_norm.weight" in weights:
        for one in "qk":
            found[f"{block}self_attention.{one}_layernorm.weight"] = joined([f"self_attn.{one}_norm.weight"])
    if "model.layers.0.mlp.gate.weight" in weights:
        found[f"{block}mlp.router.weight"] = joined(["mlp.gate.weight"])
        for number, parts in (("1", ["gate", "up"]), ("2", ["down"])):
            each = [joined([f"mlp.experts.{e}.{part}_proj.weight" for part in parts]) for e in range(EXPERTS)]
            found[f"{block}mlp.experts.experts.linear_fc{number}.weight"] = torch.stack(each, 1)
    else:
        found[f"{block}mlp.linear_fc1.weight"] = joined(["mlp.gate_proj.weight", "mlp.up_proj.weight"])
        found[f"{block}mlp.linear_fc2.weight"] = joined(["mlp.down_proj.weight"])
    return found


class Ranks(DefaultSavePlanner):
    """Writes a layer, and an expert, at a time, each in two parts, as two ranks do."""

    def __init__(self, tensors: dict[str, torch.Tensor], objects: dict[str, object]):
        super().__init__(flatten_state_dict=False)
        self.tensors, self.objects = tensors, objects
        self.parts: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        for key, tensor in self.tensors.items():
            depth = 2 if ".experts." in key else 1 if ".layers." in key else 0
            cut = tensor.ndim - 1 if "fc2" in key or "proj" in key else depth
            for index in itertools.product(*map(range, tensor.shape[:depth]), range(2)):
                half = tensor.shape[cut] // 2
                begin, sizes = (
                    [*index[:depth], *[0] * (tensor.ndim - depth)],
                    [1] * depth + [*tensor.shape[depth:]],
                )
                begin[cut], sizes[cut] = index[-1] * half, half
                part = tensor[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))].clone()
                where = MetadataIndex(key, torch.Size(begin))
                about = ChunkStorageMetadata(torch.Size(begin), part.shape)
                data = TensorWriteData(about, TensorProperties(dtype=tensor.dtype), tensor.shape)
                items.append(WriteItem(where, WriteItemType.SHARD, tensor_data=data))
                self.parts[where] = part
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        return self.parts[index] if index in self.parts else self.objects[index.fqn]


def write_folder(
    folder: Path,
    weights: dict[str, torch.Tensor],
    *,
    inside: bool = False,
    more: dict[str, torch.Tensor] | None = None,
    objects: dict[str, object] | None = None,
    arguments: object = None,
    moments: bool = True,
) -> dict[str, torch.Tensor]:
    """Write Megatron's checkpoint of a model after two steps; returns the state by the hub's names.

    inside: whether what is no tensor lies in the DCP, as later versions have it.
    """
    tensors = to_megatron(weights)
    state = {}
    for factor, kind in enumerate(("exp_avg", "exp_avg_sq"), start=2):
        if moments:
            state |= {f"{name}.{kind}": tensor * factor for name, tensor in weights.items()}
            mine = to_megatron({name: tensor * factor for name, tensor in weights.items()})
            prefix = "chained_0." if "decoder.layers.mlp.router.weight" in tensors else ""
            tensors |= {f"{prefix}optimizer.state.{kind}.{key}": tensor for key, tensor in mine.items()}
    group = {"lr": 5e-4, "max_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    common = {"iteration": 2, "checkpoint_version": 3.0}
    if moments:
        groups = [{**group, "weight_decay": 0.0}, group]
        common["optimizer"] = {"param_groups": groups, "state": {"common_step": torch.tensor(2.0)}}
    if arguments is not None:
        common["args"] = arguments
    extra = {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_2": [None] for i in range(LAYERS)}
    extra |= {"rng_state/shard_0_1": [[{}]], **(objects or {})}
    if inside:
        extra["common_state/shard_0_1"] = [common]
    else:
        torch.save(common, folder / "common.pt")
    planner = Ranks({**tensors, **(more or {})}, extra)
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks is meant
        save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    (folder / ABOUT).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return state


@pytest.mark.parametrize("inside", [False, True], ids=["common.pt", "common_state"])
def test_every_bit_is_read(hub: Path, tmp_path: Path, inside: bool):
    """Weights, moments, step and settings, of either version, below the folder that names the iteration."""
    weights = load_file(hub / "model.safetensors")
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    state = write_folder(folder, weights, inside=inside)
    (tmp_path / LATEST).write_text("2\n")
    assert format_of(tmp_path) == format_of(folder) == "megatron"
    content = FORMATS["megatron"].read(tmp_path, hub)
    for stem, expected in ((MODEL, weights), (OPTIMIZER, state)):
        found = content.tensors[stem]
        assert found.keys() >= expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(read_tensor(found[name]), tensor), name
    steps = {name: source for name, source in content.tensors[OPTIMIZER].items() if name not in state}
    assert steps.keys() == {f"{name}.step" for name in weights}
    assert all(read_tensor(source) == 2 for source in steps.values())
    assert (content.step, content.optimizer, content.state_refused) == (2, "AdamW", None)
    assert content.settings == {
        "optimizer.lr": 1e-3,
        "optimizer.betas": (0.9, 0.95),
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
    }
    assert content.left_out == ("rng_state: the state of random generators; Cairn draws by seed and step",)


def test_the_optimisers_own_weights_are_taken(llama: Path, tmp_path: Path):
    """They are float32 where the model's are bfloat16."""
    weights = load_file(tmp_path / "model.safetensors")
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    masters = {f"optimizer.state.fp32_param.{key}": t for key, t in to_megatron(weights).items()}
    write_folder(llama, half, more=masters)
    found = FORMATS["megatron"].read(llama).tensors[MODEL]
    assert all(torch.equal(read_tensor(found[name]), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("output_layer.weight", Key(("head",), "weight")),
        ("decoder.layers.mlp.linear_fc2.bias", Key(("mlp.down",), "bias", stacked=("layer",))),
        ("decoder.layers.7.input_layernorm.weight", Key(("attention_norm",), "weight", 7)),
        ("decoder.layers.7.mlp.linear_fc1.weight_v", Key(("mlp.up",), "weight", 7)),
        (
            "decoder.layers.1.mlp.experts.experts.12.linear_fc1.weight_w",
            Key(("expert.gate",), "weight", 1, 12),
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            Key(("expert.gate", "expert.up"), "weight", stacked=("layer", "expert")),
        ),
        (
            "decoder.layers.0.mlp.experts.experts.linear_fc2.weight",
            Key(("expert.down",), "weight", 0, None, ("expert",)),
        ),
        ("decoder.layers.mlp.linear_fc2.weight_w", None),
        ("decoder.layers.mlp.router.expert_bias", None),
        ("decoder.layers.mlp.shared_experts.linear_fc1.weight", None),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_bias.weight", None),
        ("mlp.linear_fc1.weight", None),
        ("position_embeddings.weight", None),
    ],
)
def test_keys(key: str, expected: Key | None):
    assert parse(key) == expected


def test_tables_have_each_role_once():
    """A role that two modules had would be written twice."""
    roles = [role for held in (*OUTSIDE.values(), *IN_LAYERS.values()) for role in held]
    assert len(roles) == len(set(roles))


def test_commands(ckpt, hub: Path, tmp_path: Path):
    """There and back: every weight of a step that is exported and imported again is the same."""
    assert ckpt("import", hub, tmp_path / "run").code == 0
    finished = ckpt("export", tmp_path / "run", tmp_path / "out", "--format", "megatron")
    assert "read back and equal" in finished.output
    assert (tmp_path / "out" / LATEST).read_text() == "release"
    finished = ckpt("import", tmp_path / "out", tmp_path / "again")
    assert "has the format megatron" in finished.output
    ours, theirs = (
        load_file(next(tmp_path.glob(f"{run}/checkpoints/*/model/*.safetensors"))) for run in ("run", "again")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_models_without_counterpart_are_not_written(ckpt, tmp_path: Path):
    """Gemma's norms and scales have none."""
    assert ckpt("import", make("gemma", tmp_path / "hub"), tmp_path / "run").code == 0
    finished = ckpt("export", tmp_path / "run", tmp_path / "out", "--format", "megatron")
    assert finished.code == 1
    assert "'gemma' has no counterpart in this format" in finished.output


def test_buckets_need_weights_only(ckpt, llama: Path, tmp_path: Path):
    """The optimiser's state is left out only where that was asked for."""
    buckets = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param": torch.ones(8)}
    write_folder(llama, load_file(tmp_path / "model.safetensors"), more=buckets, moments=False)
    refused = ckpt("import", llama, tmp_path / "run")
    assert refused.code == 1
    assert "distributed optimiser's buckets" in refused.output
    assert "--weights-only takes the weights alone" in refused.output
    assert not (tmp_path / "run").exists()
    assert "holds weights only" in ckpt("import", llama, tmp_path / "run", "--weights-only").output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer.state.momentum_buffer.output_layer.weight": torch.ones(PADDED, 64)}, "momentum_buffer"),
        (
            {"optimizer.state.exp_avg.output_layer.weight": torch.ones(2, 1, 56, 64)},
            "older versions flatten it",
        ),
    ],
)
def test_states_that_are_refused(llama: Path, tmp_path: Path, change: dict[str, torch.Tensor], said: str):
    """Other optimisers, and other layouts."""
    write_folder(llama, load_file(tmp_path / "model.safetensors"), more=change)
    content = FORMATS["megatron"].read(llama)
    assert said in str(content.state_refused)
    assert OPTIMIZER not in content.tensors


def test_keys_without_counterpart_are_listed(llama: Path, tmp_path: Path):
    """Tensors and objects, and tensors of other models."""
    weights = load_file(tmp_path / "model.safetensors")
    more = {
        "mtp.layers.0.weight": torch.ones(2, 2),
        "decoder.layers.self_attention.q_layernorm.weight": torch.ones(LAYERS, HEAD),
    }
    write_folder(llama, weights, more=more, objects={"teacher/shard_0_1": [1]})
    said = r"'llama': decoder\.layers\.self_attention\.q_layernorm\.weight, mtp\.layers\.0\.weight, teacher/"
    with pytest.raises(CheckpointError, match=said):
        FORMATS["megatron"].read(llama)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_hidden_layers": 3}, r"has shape \[2, .*\], not 3 layers"),
        ({"num_key_value_heads": 1}, "has 256 rows, and not those of 4 queries, 1 keys"),
        ({"tie_word_embeddings": True}, r"an output layer of its own.*tie_word_embeddings"),
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "'gemma' has no counterpart"),
    ],
)
def test_other_configurations_are_refused(llama: Path, settings: dict[str, object], said: str):
    """By what differs."""
    path = llama / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(CheckpointError, match=said):
        FORMATS["megatron"].read(llama)


class Kind(enum.Enum):
    """Stands for an enumeration of Megatron."""

    AUTO = 5


@pytest.fixture
def of_megatron(monkeypatch: pytest.MonkeyPatch) -> type[Kind]:
    """Kind, as if it was in a module of Megatron."""
    for name in ("megatron", "megatron.core", "megatron.core.kinds"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["megatron.core.kinds"], "Kind", Kind, raising=False)
    monkeypatch.setattr(Kind, "__module__", "megatron.core.kinds")
    return Kind


def test_arguments_of_megatron_lm(llama: Path, tmp_path: Path, of_megatron: type[Kind]):
    """They are read without their classes, and those that do not fit config.json are listed."""
    weights = load_file(tmp_path / "model.safetensors")
    fits = {
        "attention_backend": of_megatron.AUTO,
        "num_layers": LAYERS,
        "consumed_train_samples": 64,
        "rotary_base": 10000,
        **{f"more_{i}": i for i in range(300)},
    }
    write_folder(llama, weights, arguments=argparse.Namespace(**fits))
    assert FORMATS["megatron"].read(llama).samples == 64
    other = {**fits, "rotary_interleaved": True, "num_query_groups": 4, "norm_epsilon": 1e-5}
    write_folder(llama, weights, arguments=argparse.Namespace(**other))
    with pytest.raises(
        CheckpointError, match=r"norm_epsilon is 1e-05 and should be 1e-06.*rotary_interleaved is True"
    ):
        FORMATS["megatron"].read(llama)


@pytest.mark.parametrize("inside", [False, True])
def test_code_in_what_is_no_tensor_does_not_run(llama: Path, tmp_path: Path, inside: bool):
    """It is refused by the name of what it calls."""

    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    (llama / "common.pt").unlink()
    write_folder(llama, load_file(tmp_path / "model.safetensors"), arguments=Runs(), inside=inside)
    with pytest.raises(ForbiddenPickle, match=r"names posix\.mkdir, which is not allowed"):
        FORMATS["megatron"].read(llama)
    assert not (tmp_path / "ran").exists()


def test_a_flipped_bit_is_found(llama: Path):
    """In a tensor whose rows are read out of order, and in one whose last rows are not read."""
    path = next(llama.glob("*.distcp"))
    weights = FORMATS["megatron"].read(llama).tensors[MODEL]
    good = path.read_bytes()
    for key, name in (
        (weights["model.layers.1.self_attn.q_proj.weight"], "model.layers.1.self_attn.v_proj.weight"),
        (weights["lm_head.weight"], "lm_head.weight"),
    ):
        data = bytearray(good)
        place = good.index(read_tensor(key)[-1].numpy().tobytes())
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(Damaged, match="differs from its checksum"):
            read_tensor(FORMATS["megatron"].read(llama).tensors[MODEL][name])
        path.write_bytes(good)


def test_other_formats_of_megatron_are_named(llama: Path, tmp_path: Path):
    """And files that hold something else."""
    reader = FORMATS["megatron"]
    (llama / ABOUT).write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match=r"format 'zarr'.*--ckpt-format torch_dist"):
        reader.read(llama)
    (llama / ABOUT).write_text("[]")
    with pytest.raises(Damaged, match="not what megatron-core writes"):
        reader.read(llama)
    (tmp_path / LATEST).write_text("../2")
    with pytest.raises(Damaged, match="which is no iteration"):
        reader.read(tmp_path)
    (tmp_path / LATEST).write_text("7")
    assert not reader.detect(tmp_path)
    with pytest.raises(FileNotFoundError):
        reader.read(tmp_path)


def test_a_configuration_is_asked_for(ckpt, llama: Path, tmp_path: Path):
    """Megatron writes none."""
    (llama / "config.json").unlink()
    finished = ckpt("import", llama, tmp_path / "run")
    assert finished.code == 2
    assert "--model FOLDER" in finished.output


def test_stacked_tensors_in_other_chunks(llama: Path, tmp_path: Path):
    """As a program that merges the ranks' parts may write them: all layers in one."""
    weights = load_file(tmp_path / "model.safetensors")
    write_folder(llama, weights, moments=False)
    objects = {"decoder.final_layernorm._extra_state/shard_0_1": [None]}
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks is meant
        writer = FileSystemWriter(llama, overwrite=True)
        save({**to_megatron(weights), **objects}, storage_writer=writer, no_dist=True)
    found = FORMATS["megatron"].read(llama).tensors[MODEL]
    assert all(torch.equal(read_tensor(found[name]), tensor) for name, tensor in weights.items())


def test_exports_of_another_data_type(ckpt, hub: Path, tmp_path: Path):
    """Stored and read back as such."""
    assert ckpt("import", hub, tmp_path / "run").code == 0
    arguments = (tmp_path / "run", tmp_path / "out", "--format", "megatron", "--dtype", "bfloat16")
    assert "read back and equal" in ckpt("export", *arguments).output
    found = FORMATS["megatron"].read(tmp_path / "out").tensors[MODEL]
    for name, tensor in load_file(hub / "model.safetensors").items():
        assert torch.equal(read_tensor(found[name]), tensor.bfloat16()), name


def test_chunks_that_hold_the_same_values(llama: Path):
    """In one of the layers of a stacked tensor."""
    metadata = pickle.loads((llama / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks
    second = [chunk for chunk in chunks if chunk.offsets[0] == 1]
    chunks[chunks.index(second[1])] = second[0]
    (llama / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        Damaged, match=r"two chunks of decoder\.layers\.mlp\.linear_fc1\.weight hold the same"
    ):
        FORMATS["megatron"].read(llama)
