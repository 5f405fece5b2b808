"""One optimiser step of a real model on one rank and on two, which share it with FSDP2."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import free_port, join, start_ranks
from safetensors.torch import load_file, save_file
from tiny import random_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cairn.checkpoint.formats.hub import tensors_in_memory
from cairn.checkpoint.tensors import read_tensors
from cairn.config.trainer import TrainerConfig
from cairn.run.batches import Batch, Sample, Sampling
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import LossInputs, LossSums
from cairn.trainer.losses.clip import Clip
from cairn.trainer.model import build_model, weights
from cairn.trainer.optimizer import make_optimizer
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step import train_step
from cairn.trainer.trained import Trained

SIZE = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
    **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MODELS: dict[str, PreTrainedConfig] = {
    "tied": Qwen3Config(**SIZE, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "capped": Gemma2Config(**SIZE, final_logit_softcapping=2.0),
    "experts": Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
WAYS = {"at once": 1 << 26, "in chunks": 3 * 97}


def make_batch() -> Batch:
    """Three micro-batches of one row, so that the second of two ranks has one that holds nothing."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            token_ids=draw.integers(3, 97, n).astype(np.int32),
            loss_mask=draw.random(n) < 0.6,
            columns={
                "logprobs": -draw.random(n).astype(np.float32) * 6,
                "advantages": draw.normal(size=n).astype(np.float32),
            },
        )
        for n in (20, 14, 9, 24, 5)
    ]
    return Batch(samples, sampling=Sampling(0.8))


class Watching(Clip):
    """The loss, noting how many values of gradients a rank holds when a micro-batch begins."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.held: list[int] = []

    def __call__(self, inputs: LossInputs) -> LossSums:
        self.held.append(sum(values.numel() for values in self._gradients()))
        return super().__call__(inputs)

    def _gradients(self) -> Iterator[torch.Tensor]:
        if not isinstance(self.model, FSDPModule):
            yield from (p.grad for p in self.model.parameters() if p.grad is not None)
            return
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for group in itertools.chain.from_iterable(u._get_fsdp_state()._fsdp_param_groups for u in units):
            for parameter in group.fsdp_params:
                if parameter.sharded_param.grad is not None:
                    yield parameter.sharded_param.grad.to_local()
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad


def run_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    """What every rank does; the first writes down what came out."""
    group = join(rank, world_size, port)
    for name in MODELS:
        for way, chunk_logits in WAYS.items():
            row, after = one_step(group, folder / name, chunk_logits)
            if rank == 0:
                result = folder / f"{name} {way} {world_size}"
                result.with_suffix(".json").write_text(json.dumps(row))
                save_file(after, result.with_suffix(".safetensors"))
    dist.barrier()
    group.leave()


def one_step(group: RankGroup, model_folder: Path, chunk_logits: int) -> tuple[dict, dict]:
    """Metrics, and the weights after the step."""
    config = TrainerConfig(
        optimizer={"lr": 0.01, "eps": 1e-3, "max_grad_norm": 1e9},
        seq_len=24,
        router_aux_coef=0.1 if model_folder.name == "experts" else None,
    )
    model = build_model(model_folder, config, group.mesh)
    assert isinstance(model, FSDPModule) == (group.world_size > 1)
    read_tensors(model_folder, weights(model), "model")
    optimizer = make_optimizer(model.parameters(), config.optimizer)
    state = TrainerState(config, group, {POLICY: Trained(model, optimizer)}, TrainerProgress())
    state.scorer.chunk_logits = chunk_logits
    assert state.scorer.is_plain == (model_folder.name != "capped")
    if group.world_size > 1:
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) for p in parameters), "what the scorer has tried is let go of"
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        own_units = [isinstance(module, FSDPModule) for module in (embeddings, head)]
        assert own_units == [head.weight is not embeddings.weight] * 2
    work = make_rank_batch(make_batch(), config, rank=group.rank, world_size=group.world_size)
    loss = Watching(model)
    row = train_step(state, work, 1, loss)
    shards = [w.to_local() if isinstance(w, DTensor) else w for w in model.parameters()]
    assert loss.held == [0] + [sum(shard.numel() for shard in shards)] * (len(work.micros) - 1)
    after = tensors_in_memory(model).items()
    return row, {name: w.full_tensor() if isinstance(w, DTensor) else w.clone() for name, w in after}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what one rank and two ranks found."""
    folder = tmp_path_factory.mktemp("step")
    for name, config in MODELS.items():
        random_model(config).save_pretrained(folder / name)
    worlds = [start_ranks(run_rank, world, free_port(), folder, world_size=world) for world in (1, 2)]
    for ranks in worlds:
        while not ranks.join():
            pass
    return folder


def result(folder: Path, name: str, way: str, world: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Metrics and weights as the ranks wrote them down."""
    stem = folder / f"{name} {way} {world}"
    return json.loads(stem.with_suffix(".json").read_text()), load_file(stem.with_suffix(".safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_make_the_step_of_one(found: Path, name: str):
    """Its loss, its gradient and its weights, with logits at once and in chunks."""
    reference_row, reference = result(found, name, "at once", 1)
    for world in (1, 2):
        for way in WAYS:
            row, after = result(found, name, way, world)
            assert row == pytest.approx(reference_row, rel=1e-4), (world, way)
            assert after.keys() == reference.keys()
            for key, weight in after.items():
                torch.testing.assert_close(weight, reference[key], atol=1e-5, rtol=0, msg=f"{world} {key}")
