"""Checkpoints of PyTorch DCP, written by a program of two ranks with FSDP2 and by Cairn."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_program import SCHEDULED, STEPS, WIDTH, full, go_on_all, tokens, train_all
from families import make, make_config
from foreign import values
from one_rank import one_rank
from runs import start_ranks
from test_families import make_rows, start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import AutoConfig

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER, StepFolder
from cairn.checkpoint.tensors import reader
from cairn.checkpoint.tensors.placement import Place
from cairn.checkpoint.tensors.reader import ReadRange
from cairn.formats import EXPORTERS, format_of, no_progress
from cairn.formats.base import WriteOptions
from cairn.formats.common.match_layout import in_memory, state_of
from cairn.formats.dcp.dcp import Dcp, PrimeRl, Torchtitan, step_in
from cairn.formats.dcp.dcp_programs import FILE_NAME
from cairn.formats.dcp.dcp_tensors import DcpTensor, read_metadata
from cairn.formats.dcp.dcp_titan import cut, fused_parts
from cairn.formats.torch_file.pickled import held, load_pickled, source_of
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle
from cairn.formats.torch_file.torch_stream import Stream, read_value
from cairn.formats.transfer.export_step import content_of_step, export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.model.architectures import sizes_of
from cairn.model.hub_layout import hub_layout
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.connections import free_port
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Likelihood
from cairn.trainer.step.train_step import train_step

group = one_rank

MODELS = ("llama", "qwen3_tied", "qwen3_moe")
EXPORTED = ("dcp", "prime-rl", "torchtitan")
PROGRAMS = ("plain", "prime-rl", "telescope", "torchtitan", "nemo-rl")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, with a folder for each program and the truth."""
    out = tmp_path_factory.mktemp("dcp")
    for family in MODELS:
        make(family, out / family / "model")
    make("llama", out / SCHEDULED / "model")
    ranks = start_ranks(train_all, free_port(), out, world_size=2)
    while not ranks.join():
        pass
    return out


@pytest.fixture
def plain(written: Path, tmp_path: Path) -> Path:
    """A copy of the Llama of the plain program."""
    return shutil.copytree(written / "llama" / "plain", tmp_path / "plain")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("family", MODELS)
def test_every_bit_is_read(written: Path, family: str, program: str):
    """Weights, moments and the step, whatever the program calls them."""
    model = None
    if (family, program) == ("llama", "torchtitan"):
        with pytest.raises(CheckpointError, match=r"rows of its queries and keys are .* with --model FOLDER"):
            Dcp().read(written / family / program)
        model = written / family / "model"
    truth = torch.load(written / family / "truth.pt", weights_only=True)
    assert Dcp().detect(written / family / program)
    content = Dcp().read(written / family / program, model)
    assert content.step == STEPS
    assert content.optimizer == "AdamW"
    assert content.settings["optimizer.lr"] == 1e-3
    assert content.settings["optimizer.betas"] == (0.9, 0.95)
    tensors = content.tensors
    if (family, program) == ("qwen3_moe", "torchtitan"):  # the only one that does not save what is in memory
        layout, folder = hub_layout(make_config(family)), written / family
        tensors = {
            MODEL: in_memory(tensors[MODEL], layout, folder),
            OPTIMIZER: state_of(tensors[OPTIMIZER], layout, folder),
        }
    for stem, expected in ((MODEL, truth["weights"]), (OPTIMIZER, truth["state"])):
        assert tensors[stem].keys() == expected.keys()
        for name, tensor in expected.items():
            found = values(tensors[stem][name])
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name


def test_biases_of_experts(tmp_path: Path):
    """torchtitan's own: those that are zero are left out, others are refused. A critic beside it is said."""
    key, router = "layers.0.moe.expert_bias_E", torch.ones(4, 8)
    for place, bias in (("zero", torch.zeros(4)), ("skewed", torch.tensor([0, 0, 1e-3, 0]))):
        norm = {"layers.0.attention.q_norm.weight": torch.ones(8)}
        content = {**norm, "layers.0.moe.router.gate.weight": router, key: bias, "train_state": {"step": 1}}
        dcp.save(content, checkpoint_id=tmp_path / place, no_dist=True)
    (tmp_path / "zero" / "value").mkdir()
    found = Dcp().read(tmp_path / "zero")
    assert "value/ has a model of values: critics are read from verl and SkyRL" in found.left_out
    assert set(found.tensors[MODEL]) == {
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate.weight",
    }
    assert "expert_bias_E: the biases that balance experts, which are all zero" in found.left_out
    with pytest.raises(CheckpointError, match=f"would choose other experts .*load_balance_coeff.*: {key}"):
        Dcp().read(tmp_path / "skewed")


@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_state_of_fused_queries_keys_and_values(written: Path, tmp_path: Path, family: str):
    """As torchtitan has it with fuse_qkv: for each head of keys its heads of queries, the key, the value."""
    source, model = written / family / "torchtitan", written / family / "model"
    dcp_to_torch_save(source, tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt", weights_only=False)
    sizes = sizes_of(AutoConfig.from_pretrained(model))
    state, groups, head = content["optimizer"], sizes.kv_heads, sizes.head
    for key in [key for key in state if ".wq.weight." in key]:
        parts = [state.pop(key.replace(".wq.", f".{name}.")) for name in ("wq", "wk", "wv")]
        if key.startswith("state.") and parts[0].ndim:
            rows = [part.view(groups, -1, head, part.shape[1]) for part in parts]
            parts = [torch.cat(rows, dim=1).view(-1, parts[0].shape[1])]
        state[key.replace(".wq.", ".wqkv.")] = parts[0]
    dcp.save(content, checkpoint_id=tmp_path / "step-2", no_dist=True)
    expected, found = (Dcp().read(folder, model) for folder in (source, tmp_path / "step-2"))
    assert found.state_refused is None
    assert found.settings == expected.settings
    assert found.tensors[OPTIMIZER].keys() == expected.tensors[OPTIMIZER].keys()
    for name, tensor in expected.tensors[OPTIMIZER].items():
        assert torch.equal(values(found.tensors[OPTIMIZER][name]), values(tensor)), name


def test_a_fused_weight_of_several_heads_of_keys(tmp_path: Path):
    """Two heads of queries for each of three of keys."""
    head, width, groups = 4, 5, 3
    parts = [torch.randn(groups * count * head, width) for count in (2, 1, 1)]
    whole = torch.cat([part.view(groups, -1, head, width) for part in parts], dim=1).view(-1, width)
    names = fused_parts("layers.7.attention.qkv_linear.wqkv.weight")
    assert names[1] == "layers.7.attention.qkv_linear.wk.weight"
    shapes = dict(
        zip(names, (DcpTensor(torch.float32, tuple(part.shape), ()) for part in parts), strict=True)
    )
    found = cut(held("moment", whole, tmp_path), names, shapes, head)
    assert found is not None
    for name, part in zip(names, parts, strict=True):
        assert torch.equal(values(found[name], piece=7), part)
    assert cut(held("moment", whole[:-1], tmp_path), names, shapes, head) is None


def test_state_of_weights_that_are_not_there(written: Path, tmp_path: Path):
    """As of fused queries, keys and values of another shape than the weights, which are saved apart."""
    source = tmp_path / "step-2"
    shutil.copytree(written / "qwen3_tied" / "torchtitan", source)
    metadata = metadata_of(source)
    for kinds in (metadata.state_dict_metadata, metadata.planner_data):
        for key in [key for key in kinds if key.startswith("optimizer.state.") and "qkv_linear.wq" in key]:
            kinds[key.replace("qkv_linear.wq.", "qkv_linear.wqkv.")] = kinds.pop(key)
    for index in [*metadata.storage_data]:
        name = index.fqn.replace("qkv_linear.wq.", "qkv_linear.wqkv.")
        if name != index.fqn and index.fqn.startswith("optimizer.state."):
            metadata.storage_data[replace(index, fqn=name)] = metadata.storage_data.pop(index)
    (source / FILE_NAME).write_bytes(pickle.dumps(metadata))
    arguments = {"model": written / "qwen3_tied" / "model"}
    with pytest.raises(
        CheckpointError, match=r"state can't be taken .*wqkv.*--weights-only takes the weights"
    ):
        import_checkpoint(source, tmp_path / "whole", "torchtitan", **arguments)
    step, _, _ = import_checkpoint(source, tmp_path / "run", "torchtitan", weights_only=True, **arguments)
    assert StepFolder(step).tensors(MODEL)


def test_a_tensor_of_experts_has_three_dimensions(tmp_path: Path):
    """As it is cut into its experts."""
    key = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    dcp.save({key: torch.ones(4, 8)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(Damaged, match=r"w1_EFD has shape \[4, 8\], not that of experts"):
        Dcp().read(tmp_path)


def test_pieces_of_any_size(written: Path):
    """Pieces end in the middle of rows and of the ranks' chunks."""
    truth = torch.load(written / "llama" / "truth.pt", weights_only=True)["weights"]
    weights = Dcp().read(written / "llama" / "plain").tensors[MODEL]
    for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
        assert torch.equal(values(weights[name], piece=37), truth[name])


def test_chunks_cut_in_two_dimensions(tmp_path: Path):
    """As tensor parallelism cuts them, beside chunks whose values lie in columns."""
    whole = torch.arange(6 * 10, dtype=torch.float32).view(6, 10)
    dcp.save({"model": {"a": whole.clone(), "b": whole.T}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / FILE_NAME).read_bytes())
    chunks, streams = [], b""
    for top, left, rows, columns in ((0, 0, 4, 3), (0, 3, 4, 7), (4, 0, 2, 3), (4, 3, 2, 7)):
        path = tmp_path / "part"
        torch.save(whole[top : top + rows, left : left + columns].clone(), path)
        place = torch.Size([top, left])
        chunks.append(ChunkStorageMetadata(place, torch.Size([rows, columns])))
        info = next(iter(metadata.storage_data.values()))
        metadata.storage_data[MetadataIndex("model.a", place)] = replace(
            info, relative_path="__1_0.distcp", offset=len(streams), length=path.stat().st_size
        )
        streams += path.read_bytes()
    (tmp_path / "__1_0.distcp").write_bytes(streams)
    metadata.state_dict_metadata["model.a"].chunks = chunks
    (tmp_path / FILE_NAME).write_bytes(pickle.dumps(metadata))
    weights = Dcp().read(tmp_path).tensors[MODEL]
    for piece in (1, 7, 10, 13, 60):
        assert torch.equal(values(weights["a"], piece), whole)
        assert torch.equal(values(weights["b"], piece), whole.T)


def test_keys_without_counterpart_are_listed(tmp_path: Path):
    """And so is the state of another optimiser."""
    weights = {"lm_head.weight": torch.ones(2, 2)}
    dcp.save({"model": weights, "teacher": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(CheckpointError, match=r"no counterpart in Cairn: teacher\.w"):
        Dcp().read(tmp_path / "a")
    state = {"state": {"lm_head.weight": {"momentum_buffer": torch.ones(2, 2)}}}
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(CheckpointError, match=r"optim\.state\.lm_head\.weight\.momentum_buffer"):
        Dcp().read(tmp_path / "b")


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def metadata_of(folder: Path) -> Metadata:
    """What the folder's `.metadata` holds."""
    return pickle.loads((folder / FILE_NAME).read_bytes())


def test_code_in_metadata_does_not_run(plain: Path):
    """It is refused by the name of what it calls."""
    marker = plain / "marker"
    metadata = metadata_of(plain)
    for function, name in (
        (os.system, r"posix\.system"),
        (eval, r"builtins\.eval"),
        (getattr, r"builtins\.getattr"),
    ):
        metadata.planner_data = Runs(function, f"touch {marker}")
        (plain / FILE_NAME).write_bytes(pickle.dumps(metadata))
        with pytest.raises(ForbiddenPickle, match=f"names {name}, which is not allowed"):
            Dcp().read(plain)
    assert not marker.exists()


def test_code_in_a_value_does_not_run(tmp_path: Path):
    """Nor in values beside tensors, which are pickles, too."""
    marker = tmp_path / "marker"
    path = tmp_path / "value"
    torch.save({"lr": Runs(os.system, f"touch {marker}")}, path)
    with pytest.raises(ForbiddenPickle, match=r"names posix\.system"):
        read_value(Stream(path, 0, path.stat().st_size))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04Nr\xff\xff\xff\xff.", "holds a NoneType"),  # slot 4 billion of the memo
        (
            b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
            "instruction that is not allowed",
        ),  # 1 TiB of zeros
        (b"\x80\x04" + b"\x8c\x01a\x85" * 9, "not a whole pickle"),
        (b"", "not a whole pickle"),
        (b"\x80\x04K\x01.", "holds a int where a Metadata should be"),
    ],
)
def test_hostile_pickles(tmp_path: Path, data: bytes, said: str):
    """They take no memory."""
    (tmp_path / FILE_NAME).write_bytes(data)
    with pytest.raises(Damaged, match=said):
        Dcp().read(tmp_path)


def absurd_shape(metadata: Metadata) -> None:
    """A tensor of more values than disks hold."""
    size = torch.Size([1 << 40, 1 << 20])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])
    metadata.state_dict_metadata["model.model.norm.weight"] = entry
    where = MetadataIndex("model.model.norm.weight", torch.Size([0, 0]))
    metadata.storage_data[where] = next(iter(metadata.storage_data.values()))


def other_folder(metadata: Metadata) -> None:
    """A file outside the folder."""
    for info in metadata.storage_data.values():
        info.relative_path = f"../plain/{info.relative_path}"


def beyond_the_end(metadata: Metadata) -> None:
    """Bytes after the end of a file."""
    for info in metadata.storage_data.values():
        info.offset += 1 << 40


def compressed(metadata: Metadata) -> None:
    """Torch's zstd extension."""
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


def missing_chunk(metadata: Metadata) -> None:
    """Half a tensor."""
    metadata.state_dict_metadata["model.lm_head.weight"].chunks.pop()


def same_chunk_twice(metadata: Metadata) -> None:
    """As many values as the tensor has, but some of them twice."""
    chunks = metadata.state_dict_metadata["model.lm_head.weight"].chunks
    chunks[1] = chunks[0]


def without_file(metadata: Metadata) -> None:
    """A value that no file holds."""
    metadata.state_dict_metadata["model.more"] = BytesStorageMetadata()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (absurd_shape, "absurd shape"),
        (other_folder, "not a plain file name"),
        (beyond_the_end, "ends at byte"),
        (compressed, "is compressed"),
        (missing_chunk, "do not hold each of its values once"),
        (same_chunk_twice, "hold the same values"),
        (without_file, r"no file holds model\.more"),
    ],
)
def test_wrong_metadata_is_refused(plain: Path, change: Callable[[Metadata], None], said: str):
    """Before a value is read."""
    metadata = metadata_of(plain)
    change(metadata)
    (plain / FILE_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match=said):
        Dcp().read(plain)


def test_a_flipped_bit_is_found(plain: Path):
    """By the CRC-32 that torch wrote, where a tensor is read from its first to its last value."""
    source = Dcp().read(plain).tensors[MODEL]["model.layers.0.mlp.up_proj.weight"]
    wanted = values(source)
    for path in plain.glob("*.distcp"):
        data = bytearray(path.read_bytes())
        at = data.find(wanted.numpy().tobytes()[:64])
        if at >= 0:
            data[at + 5] ^= 1
            path.write_bytes(data)
    with pytest.raises(Damaged, match=r"up_proj.weight differs from its checksum"):
        values(Dcp().read(plain).tensors[MODEL]["model.layers.0.mlp.up_proj.weight"], piece=1000)


def test_a_chunk_that_is_read_for_each_of_its_parts_is_checked_each_time(tmp_path: Path):
    """Its values lie in columns, so all of it is read for any of them; a bit flips in between."""
    whole = torch.arange(6 * 10, dtype=torch.float32).view(6, 10)
    dcp.save({"model": {"b": whole.T}}, checkpoint_id=tmp_path, no_dist=True)
    source = Dcp().read(tmp_path).tensors[MODEL]["b"]
    assert torch.equal(values(source, piece=7), whole.T)
    (path,) = tmp_path.glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(whole.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="b differs from its checksum"):
        values(source, piece=7)


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_a_storage_in_another_order_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Not for each piece; also where pieces end within rows. A second pass reads it again."""
    whole = torch.arange(60 * 10, dtype=torch.float32).view(60, 10)
    if kind == "dcp":
        dcp.save({"model": {"b": whole.T}}, checkpoint_id=tmp_path, no_dist=True)
        source = Dcp().read(tmp_path).tensors[MODEL]["b"]
    else:
        torch.save({"b": whole.T}, tmp_path / "b.pt")
        source = source_of("b", load_pickled(tmp_path / "b.pt")["b"], tmp_path)
    read: list[int] = []

    def noted(pieces: list[ReadRange], read_pieces: Callable[..., object] = reader.read_pieces) -> None:
        read.extend(piece.target.numel() for piece in pieces)
        read_pieces(pieces)

    monkeypatch.setattr("cairn.formats.torch_file.torch_stream.read_pieces", noted)
    assert torch.equal(values(source, piece=7), whole.T)
    assert read.count(600) == 1
    assert torch.equal(values(source, piece=60), whole.T)
    assert read.count(600) == 2


def test_a_tensor_that_is_not_what_the_metadata_says(plain: Path):
    """Its file holds another data type than the metadata."""
    metadata = metadata_of(plain)
    metadata.state_dict_metadata["model.lm_head.weight"].properties.dtype = torch.int32
    (plain / FILE_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match=r"holds a tensor of torch\.float32"):
        values(Dcp().read(plain).tensors[MODEL]["lm_head.weight"])


def imported(written: Path, family: str, program: str, folder: Path) -> Path:
    """The step that Cairn makes of a program's checkpoint."""
    model = written / family / "model"
    return import_checkpoint(written / family / program, folder / "run", "dcp", model=model)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "program"),
    [
        ("llama", "plain"),
        ("qwen3_tied", "prime-rl"),
        ("qwen3_tied", "torchtitan"),
        ("llama", "torchtitan"),
        ("qwen3_moe", "telescope"),
        ("qwen3_moe", "nemo-rl"),
        ("qwen3_moe", "torchtitan"),
    ],
)
def test_cairn_goes_on_with_the_programs_next_losses(
    group: RankGroup, written: Path, tmp_path: Path, family: str, program: str
):
    """The first shows the weights, the second the optimiser's state."""
    step = imported(written, family, program, tmp_path)
    assert_goes_on(step, group, written / family)


def assert_goes_on(step: Path, group: RankGroup, truth: Path) -> None:
    """Cairn's next two losses, and the weights between, are those of the program that wrote `truth`."""
    weights = torch.load(truth / "truth.pt", weights_only=True)["next"]
    state = start(step / "model", group)
    state.load(step)
    for number, loss in zip(
        (STEPS + 1, STEPS + 2), json.loads((truth / "losses.json").read_text()), strict=True
    ):
        rows = tokens(number, state.policy.module.config.vocab_size).to(torch.int32).numpy()
        batch = Batch([Sample(row, np.arange(WIDTH) >= 1) for row in rows], sampling=FROM_TEXT)
        found = train_step(state, make_rows(state, batch), number, Likelihood())["loss"]
        assert found == pytest.approx(loss, rel=1e-5)
        if number == STEPS + 1:
            for name, tensor in state.policy.module.state_dict().items():
                torch.testing.assert_close(full(tensor), weights[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def returned(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `written` has, with a folder `out-<format>` for each model and format that Cairn exports.

    Beside it is a file with the losses of the program that went on from there.
    """
    for family in MODELS:
        step = imported(written, family, "prime-rl", tmp_path_factory.mktemp(family))
        for name in EXPORTED:
            export(step, written / family / f"out-{name}", name, WriteOptions())
    run = tmp_path_factory.mktemp(SCHEDULED)
    step, _, _ = import_checkpoint(
        written / SCHEDULED / "plain", run, "dcp", model=written / SCHEDULED / "model"
    )
    content = content_of_step(step)
    schedule = {"scheduler.type": "linear", "scheduler.warmup_steps": 1, "scheduler.steps": 5}
    content = replace(content, settings={**content.settings, **schedule}, tokens=96, samples=4)
    for name in ("dcp", "torchtitan"):
        folder = written / SCHEDULED / f"out-{name}"
        folder.mkdir()
        EXPORTERS[name].write(content, folder, WriteOptions())
    ranks = start_ranks(go_on_all, free_port(), written, world_size=2)
    while not ranks.join():
        pass
    return written


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("family", MODELS)
def test_the_program_goes_on_from_an_exported_step(returned: Path, family: str, name: str):
    """On two ranks, with `dcp.load` into its own nested state, in which no value may be missing."""
    assert format_of(returned / family / f"out-{name}") == name
    found = json.loads((returned / family / f"losses-{name}.json").read_text())
    assert found == pytest.approx(json.loads((returned / family / "losses.json").read_text()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcp", "torchtitan"])
def test_the_program_goes_on_with_its_schedule(returned: Path, name: str):
    """The rate in the exported optimiser is the next step's; a restored schedule sets later ones."""
    found = json.loads((returned / SCHEDULED / f"losses-{name}.json").read_text())
    assert found == pytest.approx(json.loads((returned / SCHEDULED / "losses.json").read_text()), rel=1e-5)


@pytest.mark.parametrize("family", MODELS)
def test_the_groups_of_an_exported_step(returned: Path, family: str):
    """AdamW's settings, and the names of all weights."""
    truth = torch.load(returned / family / "truth.pt", weights_only=True)
    groups = [{"params": [], "lr": 1.0, "weight_decay": 1.0, "decoupled_weight_decay": False}]
    found = {"optim": {"param_groups": groups}, "step": 0}
    dcp.load(found, checkpoint_id=returned / family / "out-dcp", no_dist=True)
    (group,) = found["optim"]["param_groups"]
    assert found["step"] == STEPS
    assert set(group["params"]) == {name.rpartition(".")[0] for name in truth["state"]}
    assert group["decoupled_weight_decay"] is True
    assert group["lr"] == 1e-3


def test_the_rate_of_the_next_step(written: Path, tmp_path: Path):
    """Programs take it from the group of weights, not from the schedule; and what they decay is said."""
    content = content_of_step(imported(written, "llama", "plain", tmp_path))
    schedule = {"type": "linear", "warmup_steps": 10, "steps": 20}
    settings = {f"scheduler.{name}": value for name, value in schedule.items()}
    settings = {**content.settings, **settings, "optimizer.weight_decay": 0.1}
    content = replace(content, settings=settings)
    verify = Torchtitan().write(content, tmp_path, WriteOptions())
    values = read_metadata(tmp_path / f"step-{STEPS}").values
    group = "optimizer.param_groups.tok_embeddings.weight"
    assert read_value(values[f"{group}.lr"]) == pytest.approx(1e-3 * (STEPS + 1) / 10)
    assert read_value(values[f"{group}.initial_lr"]) == 1e-3
    assert read_value(values[f"{group}.weight_decay"]) == 0.1
    assert read_value(values["lr_scheduler._last_lr"]) == [pytest.approx(1e-3 * (STEPS + 1) / 10)]
    assert (
        verify(no_progress)
        == "read back and equal; torchtitan decays all weights by 0.1, Cairn matrices only"
    )


@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_progress_counts_what_is_written_once(written: Path, tmp_path: Path, dtype: str | None):
    """Also where tied weights are written twice, and others converted."""
    content = content_of_step(imported(written, "qwen3_tied", "plain", tmp_path))
    told: list[int] = []
    PrimeRl().write(content, tmp_path, WriteOptions(dtype, on_bytes=told.append))
    halved = {MODEL} if dtype else set[str]()
    sizes = [
        source.spec.nbytes // (2 if stem in halved else 1)
        for stem, named in content.tensors.items()
        for source in named.values()
    ]
    assert sorted(told) == sorted(sizes)


@pytest.mark.parametrize("name", ["prime-rl", "torchtitan"])
def test_weights_alone_are_exported(written: Path, tmp_path: Path, name: str):
    """Those of a model's folder, which are of no step; what the program does otherwise is said."""
    step, _, _ = import_checkpoint(written / "qwen3_moe" / "model", tmp_path / "run", "hf")
    content = content_of_step(step)
    (tmp_path / "out").mkdir()
    said = EXPORTERS[name].write(content, tmp_path / "out", WriteOptions())(no_progress)
    assert said.startswith("read back and equal")
    assert ("load_balance_coeff = None" in said) == ("route_norm = False" in said) == (name == "torchtitan")


def test_a_step_that_does_not_say_its_settings(written: Path, tmp_path: Path):
    """One from a program that saved none is no checkpoint of prime-rl."""
    content = replace(content_of_step(imported(written, "llama", "plain", tmp_path)), settings={})
    with pytest.raises(CheckpointError, match=r"does not say its optimizer\.betas, .*, which prime-rl needs"):
        PrimeRl().write(content, tmp_path, WriteOptions())


def test_the_newest_step_of_a_folder(written: Path, tmp_path: Path):
    """Where its folder is whole."""
    for step in (9, 10):
        shutil.copytree(written / "qwen3_tied" / "torchtitan", tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()
    assert format_of(tmp_path) == "torchtitan"
    assert step_in(tmp_path) == tmp_path / "step-10"
    assert Torchtitan().read(tmp_path).step == STEPS


def test_an_optimiser_of_single_experts(written: Path, tmp_path: Path):
    """As programs with older versions of transformers have it, where experts are modules."""
    truth = torch.load(written / "qwen3_moe" / "truth.pt", weights_only=True)
    layout = hub_layout(make_config("qwen3_moe"))
    weights, state = {}, {}
    for name, place in layout.places.items():

        def cut(tensor: torch.Tensor, place: Place = place) -> torch.Tensor:
            return tensor.view(-1)[place.first :][: math.prod(place.shape)].view(place.shape)

        weights[name] = cut(truth["weights"][place.name])
        state[name] = {
            "exp_avg": cut(truth["state"][f"{place.name}.exp_avg"]),
            "exp_avg_sq": cut(truth["state"][f"{place.name}.exp_avg_sq"]),
            "step": truth["state"][f"{place.name}.step"],
        }
    content = {"model": weights, "optim": {"state": state}}
    dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    model = written / "qwen3_moe" / "model"
    step = StepFolder(import_checkpoint(tmp_path / "a", tmp_path / "run", "dcp", model=model)[0])
    found = step.tensors(OPTIMIZER)
    assert found.keys() == truth["state"].keys()
    for name, tensor in truth["state"].items():
        assert torch.equal(values(found[name]), tensor), name
    state["model.layers.0.mlp.experts.1.up_proj.weight"]["step"] = torch.tensor(1.0)
    dcp.save(content, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(CheckpointError, match=r"different steps .*experts.1.up_proj"):
        import_checkpoint(tmp_path / "b", tmp_path / "other", "dcp", model=model)
    del state["model.layers.0.mlp.experts.1.up_proj.weight"]
    dcp.save(content, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointError, match=r"exp_avg is missing .*experts.1.up_proj"):
        import_checkpoint(tmp_path / "c", tmp_path / "third", "dcp", model=model)
