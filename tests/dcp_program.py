"""A program of two ranks that trains with FSDP2 and saves with torch's own DCP, as others do."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from cairn.trainer.group import RankGroup

STEPS = 2
RATE = 1e-3
WIDTH = 24
SCHEDULED = "scheduled"
"""The folder of the model whose rate falls with each step."""
Layout = Callable[[dict[str, Any], dict[str, Any]], dict[str, dict[str, Any]]]


def tokens(step: int, vocabulary: int) -> torch.Tensor:
    """The rows that a step learns: int64 [2, WIDTH]."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (2, WIDTH), generator=draw)


def train_all(rank: int, port: int, out: Path) -> None:
    """Train each of the models `out/*/model`, and save beside it."""
    group = join(rank, 2, port)
    for folder in sorted(out.glob("*/model")):
        train(group, folder, folder.parent)
    group.leave()


def go_on_all(rank: int, port: int, out: Path) -> None:
    """Go on from each checkpoint `out/*/out-<format>` with the next two steps; write their losses."""
    group = join(rank, 2, port)
    for folder in sorted(out.glob("*/out-*")):
        name = folder.name.removeprefix("out-")
        program = Program(group, folder.parent / "model")
        program.follow_schedule(folder.parent)
        program.load(folder, name)
        if program.schedule is not None:
            program.schedule.last_epoch = STEPS  # which is what its load_state_dict does
        losses = [program.step(number) for number in (STEPS + 1, STEPS + 2)]
        if group.rank == 0:
            (folder.parent / f"losses-{name}.json").write_text(json.dumps(losses))
    dist.barrier()
    group.leave()


class Program:
    """A model and its optimiser."""

    def __init__(self, group: RankGroup, model_folder: Path, *, named: bool = False, **sharding: Any):
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        sharding = {"mesh": group.mesh, **sharding}
        for layer in self.model.model.layers:
            fully_shard(layer, **sharding)
        fully_shard(self.model, **sharding)
        weights = self.model.named_parameters() if named else self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None

    def follow_schedule(self, folder: Path) -> None:
        """Have the rate fall with each step if this is the folder SCHEDULED."""
        if folder.name == SCHEDULED:
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: max(1 - n / 4, 0.0))

    def step(self, number: int) -> float:
        """Train a step; returns the loss before it."""
        rows = tokens(number, self.model.config.vocab_size)
        loss = self.model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        return loss.item()

    def load(self, folder: Path, name: str) -> None:
        """Load a checkpoint, in the way of the program for which the format `name` is."""
        weights, state = get_state_dict(self.model, self.optimizer)
        if name == "torchtitan":
            content = titan(self, weights)
            dcp.load(content, checkpoint_id=folder / f"step-{STEPS}")
            assert content["train_state"]["step"] == STEPS
            assert content["lr_scheduler"]["last_epoch"] == STEPS
            for key in weights:
                weights[key] = self.from_titan(key, [content[own] for own in titan_keys(key)])
            assert not any(value.any() for key, value in content.items() if "expert_bias" in key)
            flat = {}
            for key in self.flat():
                kind, name, what = in_flat(key)
                own = [content["optimizer"][f"{kind}.{own}.{what}"] for own in titan_keys(name)]
                flat[key] = self.from_titan(name, own)
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            both = {"model_state_dict": weights, "optim_state_dict": flat}
            set_state_dict(self.model, self.optimizer, **both, options=options)
            return
        if name == "prime-rl":
            app = layouts(self, weights, state)[name]["trainer"]["app"]
            dcp.load({"app": app}, checkpoint_id=folder / f"step_{STEPS}" / "trainer")
            assert app["progress"] == {"step": STEPS, "total_tokens": 96, "total_samples": 4}
            assert app["scheduler"]["last_epoch"] == STEPS
            state = app["optimizers"]
        else:
            content = {"model": weights, "optim": state, "step": 0}
            dcp.load(content, checkpoint_id=folder)
            assert content["step"] == STEPS
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state)

    def flat(self) -> dict[str, Any]:
        """The optimiser's state by weight, as torchtitan has it."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_state_dict(self.model, self.optimizer, options=options)[1]

    def to_titan(self, name: str, value: Any) -> dict[str, Any]:
        """torchtitan's tensors in a weight, in a moment of it, or the same value for each of them."""
        keys = titan_keys(name)
        if len(keys) == 1 or getattr(value, "ndim", 0) != 3:
            return dict.fromkeys(keys, self.in_rows(name, value, to_hub=False))
        halves = full(value).chunk(len(keys), dim=1)
        placed = (distribute_tensor(h.contiguous(), value.device_mesh, value.placements) for h in halves)
        return dict(zip(keys, placed, strict=True))

    def from_titan(self, name: str, values: list[Any]) -> Any:
        """The opposite of `to_titan`."""
        if len(values) == 1 or getattr(values[0], "ndim", 0) != 3:
            return self.in_rows(name, values[0], to_hub=True)
        whole = torch.cat([full(value) for value in values], dim=1)
        return distribute_tensor(whole, values[0].device_mesh, values[0].placements)

    def in_rows(self, name: str, tensor: Any, *, to_hub: bool) -> Any:
        """A weight of a Llama, or its moments, with the rows of queries and keys as torchtitan has them."""
        config = self.model.config
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = heads.get(name.split(".")[-2])
        if config.model_type != "llama" or count is None or getattr(tensor, "ndim", 0) != 2:
            return tensor
        pairs = (-1, 2) if to_hub else (2, tensor.shape[0] // count // 2)
        whole = full(tensor).view(count, *pairs, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        return distribute_tensor(whole, tensor.device_mesh, tensor.placements)


def train(group: RankGroup, model_folder: Path, out: Path) -> None:
    """Train STEPS steps, save in every layout, and write the truth and the losses of the next two steps."""
    program = Program(group, model_folder)
    program.follow_schedule(out)
    model, optimizer, step = program.model, program.optimizer, program.step
    for number in range(1, STEPS + 1):
        step(number)
    weights, state = get_state_dict(model, optimizer)
    plain = {"plain": {"": {"model": weights, "optim": state, "step": STEPS}}}
    saved = plain if program.schedule else layouts(program, weights, state)  # which makes other schedules
    for name, folders in saved.items():
        for place, content in folders.items():
            dcp.save(content, checkpoint_id=out / name / place)
    tell(group, program, out)


def tell(group: RankGroup, program: Program, out: Path) -> None:
    """Write the truth, and the losses of the next two steps and the weights after the first of them."""
    weights, state = get_state_dict(program.model, program.optimizer)
    whole = {name: full(tensor) for name, tensor in weights.items()}
    moments = {f"{n}.{k}": full(v) for n, entries in state["state"].items() for k, v in entries.items()}
    losses = [program.step(STEPS + 1)]
    following = {name: full(tensor) for name, tensor in program.model.state_dict().items()}
    losses.append(program.step(STEPS + 2))
    if group.rank == 0:
        torch.save({"weights": whole, "state": moments, "next": following}, out / "truth.pt")
        (out / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, of a shard or not."""
    whole = tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return whole.detach().clone()


def layouts(
    program: Program, weights: dict[str, Any], state: dict[str, Any]
) -> dict[str, dict[str, dict[str, Any]]]:
    """What each program saves, by its name and the folder in its checkpoint."""
    both = {"state": state["state"], "param_groups": state["param_groups"]}
    schedule = {"last_epoch": STEPS, "base_lrs": [RATE], "lr_lambdas": [None]}
    progress = {"step": STEPS, "total_tokens": 96, "total_samples": 4}
    constant = torch.optim.lr_scheduler.ConstantLR(program.optimizer, factor=1.0)
    constant.last_epoch = STEPS
    return {
        "plain": {"": {"model": weights, "optim": both, "step": STEPS}},
        "prime-rl": {
            "trainer": {
                "app": {
                    "model": weights,
                    "optimizers": both,
                    "scheduler": constant.state_dict(),
                    "progress": progress,
                }
            }
        },
        "telescope": {"": {"model": weights, "optimizer": both, "scheduler": schedule, "step": STEPS}},
        "torchtitan": {"": titan(program, weights)},
        "nemo-rl": {
            "policy/weights": {"model": weights},
            "policy/optimizer": {"optim": {"optim": both, "sched": schedule}},
        },
    }


def titan(program: Program, weights: dict[str, Any]) -> dict[str, Any]:
    """What torchtitan saves: its own names at the top, and the optimiser's state by weight."""
    ours = {}
    for name, value in weights.items():
        ours |= program.to_titan(name, value)
        if name.endswith(".mlp.experts.down_proj"):
            ours[f"{to_titan(name.removesuffix('.mlp.experts.down_proj'))}.moe.expert_bias_E"] = torch.zeros(
                value.shape[0]
            )
    schedule = torch.optim.lr_scheduler.LambdaLR(program.optimizer, partial(pow, 1.0))
    schedule.last_epoch = STEPS
    optimizer = {}
    for key, value in program.flat().items():
        kind, name, what = in_flat(key)
        optimizer |= {f"{kind}.{own}.{what}": v for own, v in program.to_titan(name, value).items()}
    return {
        **ours,
        "optimizer": optimizer,
        "lr_scheduler": schedule.state_dict(),
        "train_state": {"step": STEPS, "ntokens_seen": 96},
    }


def in_flat(key: str) -> tuple[str, str, str]:
    """The kind, the weight and the value that a key of `Program.flat` names."""
    kind, _, rest = key.partition(".")
    name, _, what = rest.rpartition(".")
    return kind, name, what


def titan_keys(name: str) -> list[str]:
    """torchtitan's names of what is in a weight; it has the two halves of `gate_up_proj` apart."""
    layer, _, experts = name.rpartition(".mlp.experts.")
    if not layer:
        return [to_titan(name)]
    owns = {"gate_up_proj": ("w1_EFD", "w3_EFD"), "down_proj": ("w2_EDF",)}[experts]
    return [f"{to_titan(layer)}.moe.routed_experts.inner_experts.{own}" for own in owns]


def to_titan(name: str) -> str:
    """torchtitan's name of a weight of Llama or Qwen3 other than experts."""
    parts = {
        "model.embed_tokens": "tok_embeddings",
        "model.layers": "layers",
        "model.norm": "norm",
        "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv",
        "self_attn.o_proj": "attention.wo",
        "self_attn": "attention",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.gate.": "moe.router.gate.",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for theirs, titan in parts.items():
        name = name.replace(theirs, titan)
    return name
