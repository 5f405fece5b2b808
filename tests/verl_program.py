"""A program of two ranks that trains with FSDP2, and saves its shards as verl and SkyRL do."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dcp_program import RATE, STEPS, Program, full, tell, tokens
from runs import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification

from cairn.trainer.group import RankGroup

COUNTED = 9
"""The program's own count of steps, of which each has several of the optimiser's."""


def by_last(weight: nn.Parameter) -> Shard:
    """Cut matrices by their columns."""
    return Shard(weight.ndim - 1)


class SkyRLCritic(nn.Module):
    """The layers and a head, as SkyRL names them."""

    def __init__(self, folder: Path):
        super().__init__()
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.value_head = nn.Linear(self.model.config.hidden_size, 1, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.value_head(self.model(input_ids=rows, use_cache=False).last_hidden_state)[..., 0]


class TRLHead(nn.Module):
    """The head of TRL's wrapper."""

    def __init__(self, width: int):
        super().__init__()
        self.summary = nn.Linear(width, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.summary(states)[..., 0]


class TRLCritic(nn.Module):
    """A causal language model and a head, as TRL's wrapper names them, which verl falls back to."""

    def __init__(self, folder: Path):
        super().__init__()
        self.pretrained_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.v_head = TRLHead(self.pretrained_model.config.hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        states = self.pretrained_model(input_ids=rows, use_cache=False, output_hidden_states=True)
        return self.v_head(states.hidden_states[-1])


class Classifier(nn.Module):
    """A model for token classification with one label, which is what verl makes."""

    def __init__(self, folder: Path):
        super().__init__()
        about = AutoConfig.from_pretrained(folder, num_labels=1, classifier_dropout=0.0)
        self.inner = AutoModelForTokenClassification.from_pretrained(
            folder, config=about, dtype=torch.float32
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=rows, use_cache=False).logits[..., 0]


CRITICS = {"llama": Classifier, "qwen3_tied": SkyRLCritic, "qwen3_moe": TRLCritic}
"""The class of the critic beside each model."""


def rewards(step: int) -> torch.Tensor:
    """What each row of a step earns at its end: float32 [2]."""
    return torch.randn(2, generator=torch.Generator().manual_seed(100 + step))


class CriticProgram:
    """A critic and its optimiser."""

    def __init__(self, group: RankGroup, folder: Path):
        torch.manual_seed(7)
        self.whole = CRITICS[folder.parent.name](folder)
        self.vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        self.model = self.whole.inner if isinstance(self.whole, Classifier) else self.whole
        for module in self.model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                fully_shard(module, mesh=group.mesh)
        fully_shard(self.model, mesh=group.mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, number: int) -> float:
        """Train a step on values before each token but the first; returns the loss before it."""
        values = self.whole(tokens(number, self.vocabulary))[:, :-1]
        loss = 0.5 * (values - rewards(number)[:, None]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


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
        critic = CriticProgram(group, folder)
        for number in range(1, STEPS + 2):
            critic.step(number)
        save(group.rank, program, critic, folder.parent, skyrl=folder.parent.name == "qwen3_tied")
        tell(group, program, folder.parent)
        losses = [critic.step(number) for number in (STEPS + 2, STEPS + 3)]
        if group.rank == 0:
            (folder.parent / "critic_losses.json").write_text(json.dumps(losses))
    group.leave()


def save(rank: int, program: Program, critic: CriticProgram, out: Path, *, skyrl: bool) -> None:
    """Write `out/run`, as the program's checkpoint manager does."""
    step = out / "run" / f"global_step_{COUNTED}"
    for model, folder in ((program, "policy" if skyrl else "actor"), (critic, "critic")):
        save_model(rank, model, out, step / folder, skyrl=skyrl)
    if rank == 0:
        latest = "latest_ckpt_global_step.txt" if skyrl else "latest_checkpointed_iteration.txt"
        (out / "run" / latest).write_text(str(COUNTED))
        torch.save({"position": 3}, step / "data.pt")
        whole = {name: full(tensor) for name, tensor in critic.model.state_dict().items()}
        torch.save(whole, out / "critic.pt")
    else:
        for tensor in critic.model.state_dict().values():
            full(tensor)
    dist.barrier()


def save_model(rank: int, program: Program | CriticProgram, out: Path, policy: Path, *, skyrl: bool) -> None:
    """Write the folder of one model."""
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
    state["param_groups"][0].setdefault("initial_lr", RATE)
    for kind, content in (("model", program.model.state_dict()), ("optim", state), ("extra_state", extra)):
        torch.save(content, policy / f"{kind}_world_size_2_rank_{rank}.pt")
    if rank == 0:
        AutoConfig.from_pretrained(out / "model").save_pretrained(policy / "huggingface")
        about = {"fsdp_strategy": "fsdp2"} if skyrl else {"FSDP_version": 2}
        (policy / "fsdp_config.json").write_text(json.dumps({**about, "world_size": 2}))
