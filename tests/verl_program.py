"""A program of two ranks that trains with FSDP2, and saves its shards as verl and SkyRL do."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dcp_program import RATE, STEPS, Program, tell
from runs import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from transformers import AutoConfig

COUNTED = 9
"""The program's own count of steps, of which each has several of the optimiser's."""


def by_last(weight: nn.Parameter) -> Shard:
    """Cut matrices by their columns."""
    return Shard(weight.ndim - 1)


def train_all(rank: int, port: int, out: Path) -> None:
    """Train each of the models `out/*/model`; each folder is written by another program."""
    group = join(rank, 2, port)
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp"))
    how: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen3_tied": {"mesh": copies},
        "qwen3_moe": {"shard_placement_fn": by_last, "named": True},
    }
    for folder in sorted(out.glob("*/model")):
        program = Program(group, folder, **how[folder.parent.name])
        for number in range(1, STEPS + 1):
            program.step(number)
        save(group.rank, program, folder.parent, skyrl=folder.parent.name == "qwen3_tied")
        tell(group, program, folder.parent)
    group.leave()


def save(rank: int, program: Program, out: Path, *, skyrl: bool) -> None:
    """Write `out/run`, as the program's checkpoint manager does."""
    policy = out / "run" / f"global_step_{COUNTED}" / ("policy" if skyrl else "actor")
    policy.mkdir(parents=True, exist_ok=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(program.optimizer, lambda step: 1.0)
    schedule.last_epoch = STEPS
    random_states = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    extra: dict[str, Any] = {"lr_scheduler": schedule.state_dict(), "rng": random_states}
    if skyrl:
        extra |= {"client_state": {"step": COUNTED}, "tag": None, "fsdp_strategy": "fsdp2"}
        extra |= {"world_size": 2, "rank": rank}
    state = program.optimizer.state_dict()
    assert state["param_groups"][0]["initial_lr"] == RATE
    for kind, content in (("model", program.model.state_dict()), ("optim", state), ("extra_state", extra)):
        torch.save(content, policy / f"{kind}_world_size_2_rank_{rank}.pt")
    if rank == 0:
        AutoConfig.from_pretrained(out / "model").save_pretrained(policy / "huggingface")
        about = {"fsdp_strategy": "fsdp2"} if skyrl else {"FSDP_version": 2}
        (policy / "fsdp_config.json").write_text(json.dumps({**about, "world_size": 2}))
        latest = "latest_ckpt_global_step.txt" if skyrl else "latest_checkpointed_iteration.txt"
        (out / "run" / latest).write_text(str(COUNTED))
        (policy.parent / "critic").mkdir()
        torch.save({"position": 3}, policy.parent / "data.pt")
    dist.barrier()
