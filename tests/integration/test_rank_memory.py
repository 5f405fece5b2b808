"""How much memory a rank takes."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from runs import ABOUT, join, start_ranks
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from cairn.checkpoint.saving.saver import Saver, SavingRank
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.trainer import SFTConfig
from cairn.run.connections import free_port
from cairn.trainer.models.model import build_model, weights, weights_in

WIDE = LlamaConfig(
    **{"vocab_size": 1000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 5},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False},
)
"""1.04 GB in float32, of which a layer has a fifth."""
ALLOWED = 1.15


def status(key: str) -> int:
    """Bytes of this process: in use (VmRSS) or reserved (VmSize), now or at most (VmHWM, VmPeak)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def write_wide(folder: Path) -> int:
    """A model as on the hub, its values random; returns its bytes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(WIDE)
    WIDE.save_pretrained(folder)
    values = torch.rand(8 << 20)  # written over and over: what they are does not matter
    tensors = {
        name: values.repeat(-(-tensor.numel() // len(values)))[: tensor.numel()].view(tensor.shape)
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def build_load_save(rank: int, port: int, folder: Path) -> None:
    """Notes by how much a rank grew at most, and what it must hold."""
    group = join(rank, 2, port)
    before, reserved_before = status("VmRSS"), status("VmSize")
    model = build_model(folder / "wide", SFTConfig(), group)
    reserved = status("VmPeak") - reserved_before
    read_tensors(folder / "wide", weights_in(model, folder / "wide"), "model", rank=rank)
    loaded = status("VmHWM")
    saver = Saver(CheckpointStore(folder), SavingRank(rank, 2, "run:1"))
    saver.save(1, {"model/model": weights(model)}, {}, {**ABOUT, "world_size": 2})
    saver.finish()
    saver.close()
    shards = sum(tensor.to_local().nbytes for tensor in weights(model).values())
    (layer, *_) = model.model.layers
    needed = shards + sum(tensor.numel() * tensor.element_size() for tensor in layer.parameters())
    grown = {"reserved": reserved, "loaded": loaded - before, "saved": status("VmHWM") - before}
    found = {**grown, "needed": needed, "arena": shards}
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    group.leave()


def test_a_rank_holds_its_shards_and_never_the_model(tmp_path: Path):
    """While the model is built, loaded and saved; a save needs a copy of the shards."""
    size = write_wide(tmp_path / "wide")
    assert size > 1_000_000_000
    ranks = start_ranks(build_load_save, free_port(), tmp_path, world_size=2)
    while not ranks.join():
        pass
    verify(tmp_path / "step_1")
    for rank in range(2):
        found = json.loads((tmp_path / f"found_{rank}.json").read_text())
        assert size / 2 < found["needed"] < 0.75 * size
        assert found["reserved"] < ALLOWED * found["needed"], found
        assert found["loaded"] < ALLOWED * found["needed"], found
        assert found["saved"] < ALLOWED * (found["needed"] + found["arena"]), found


def test_a_deterministic_rank_leaves_new_memory_as_it_is(tmp_path: Path):
    """A tensor takes memory once its values are written."""
    ranks = start_ranks(allocate, free_port(), tmp_path / "grown", world_size=1)
    while not ranks.join():
        pass
    assert int((tmp_path / "grown").read_text()) < 20 << 20


def allocate(rank: int, port: int, result: Path) -> None:
    """Notes by how much a tensor of 256 MB that nobody writes to makes the process grow."""
    join(rank, 1, port, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    before = status("VmRSS")
    tensor = torch.empty(64 << 20)
    result.write_text(str(status("VmRSS") - before))
    assert tensor.numel()
