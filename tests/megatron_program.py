"""A program of two ranks that trains with megatron-core on CPUs, and saves with `dist_checkpointing`.

`python -m torch.distributed.run --nproc-per-node=2 tests/megatron_program.py train|load FOLDER` needs only
torch and megatron-core, so that any version of them can run it. For each of RUNS, `train` reads what Cairn
exported to FOLDER/<name>/start, makes STEPS optimiser steps, saves FOLDER/<name>/trained, and makes one step
more; `load` reads FOLDER/<name>/back. Both write the logits of the rows of step 0.
"""

import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

STEPS = 2
WIDTH = 24
RATE, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Run:
    """How one checkpoint comes to be.

    family: of the model. tensor, expert: sizes of these parallelisms when it is trained. loaded: the same of
    tensor parallelism when it is loaded. padded: rows of the embedding; 0 for as many as there are tokens.
    sharding: the layout of the distributed optimiser's state; empty for the optimiser that is not.
    metadata: more of how the model is stored.
    """

    name: str
    family: str
    tensor: int = 2
    expert: int = 1
    loaded: int = 1
    padded: int = 0
    sharding: str = ""
    metadata: dict[str, bool] = field(default_factory=dict)


RUNS = [
    Run("llama", "llama"),
    Run("qwen2", "qwen2", tensor=1, loaded=2, sharding="fully_reshardable"),
    Run("qwen3", "qwen3", metadata={"singleton_local_shards": True}),
    Run("tied", "qwen3_tied", loaded=2),
    Run("experts", "qwen3_moe", tensor=1, expert=2),
    Run("padded", "llama", padded=112, loaded=2),
    Run("buckets", "llama", tensor=1, sharding="dp_reshardable"),
]


def tokens(step: int, vocabulary: int) -> torch.Tensor:
    """The rows that a step learns, without the token that pads, which transformers does not learn.

    int64 [2, WIDTH].
    """
    return torch.randint(3, vocabulary, (2, WIDTH), generator=torch.Generator().manual_seed(step))


class OnCpu(torch.overrides.TorchFunctionMode):
    """Makes the parts of megatron-core that name CUDA use the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def use_cpu() -> None:
    """Replace what asks for a GPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_stream = lambda *_: SimpleNamespace(
        wait_stream=lambda _: None, wait_event=lambda _: None
    )
    torch.cuda.FloatTensor = torch.FloatTensor
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    random.initialize_rng_tracker()
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    OnCpu().__enter__()


class Model:
    """Megatron's model of a config.json, with the parallelism of a run."""

    def __init__(self, run: Run, folder: Path, tensor: int, expert: int):
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        about = json.loads((folder / "config.json").read_text())
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.run, self.vocabulary = run, about["vocab_size"]
        experts = about.get("num_experts") or about.get("num_local_experts")
        normed = about["model_type"] in ("qwen3", "qwen3_moe")
        more: dict[str, Any] = {}
        if experts:
            more = {
                "num_moe_experts": experts,
                "moe_router_topk": about["num_experts_per_tok"],
                "moe_ffn_hidden_size": about["moe_intermediate_size"],
                "moe_aux_loss_coeff": 0.0,
                "moe_router_load_balancing_type": "none",
                "moe_token_dispatcher_type": "allgather",
                "moe_router_pre_softmax": not about["norm_topk_prob"],
            }
        self.config = TransformerConfig(
            num_layers=about["num_hidden_layers"],
            hidden_size=about["hidden_size"],
            ffn_hidden_size=about["intermediate_size"],
            num_attention_heads=about["num_attention_heads"],
            num_query_groups=about["num_key_value_heads"],
            kv_channels=about["head_dim"],
            layernorm_epsilon=about["rms_norm_eps"],
            tensor_model_parallel_size=tensor,
            expert_model_parallel_size=expert,
            add_qkv_bias=about["model_type"] == "qwen2",
            qk_layernorm=normed,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            **more,
        )
        self.module = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=experts, qk_layernorm=normed, normalization="RMSNorm"
            ),
            vocab_size=run.padded or self.vocabulary,
            max_sequence_length=about["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=about["rope_parameters"]["rope_theta"],
            share_embeddings_and_output_weights=about["tie_word_embeddings"],
        )

    def load(self, folder: Path) -> None:
        """Fill the weights from a checkpoint; names that are missing in either are errors."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load({"model": self.module.sharded_state_dict()}, str(folder))
        self.module.load_state_dict(state["model"], strict=True)

    def logits(self) -> torch.Tensor:
        """Of the rows of step 0: float32 [2, WIDTH, rows of the embedding]."""
        with torch.no_grad():
            mine = self.module(*self.inputs(tokens(0, self.vocabulary))).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, -1)

    def inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions, and what no token may look at."""
        width = rows.shape[1]
        later = torch.triu(torch.ones(1, 1, width, width, dtype=torch.bool), 1)
        return rows, torch.arange(width).expand(len(rows), -1), later


def train(run: Run, folder: Path) -> None:
    """Train, save, and write what the next step does."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = Model(run, folder / "start", run.tensor, run.expert)
    model.load(folder / "start" / "release")
    logits = {"start": model.logits()}
    split = bool(run.sharding)
    parallel = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=split), model.module
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=RATE,
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            clip_grad=CLIP,
            use_distributed_optimizer=split,
        ),
        [parallel],
    )

    def step(number: int) -> float:
        for group in optimizer.param_groups:  # Megatron-LM's schedule does so
            group["weight_decay"] = DECAY * group["wd_mult"]
        rows = tokens(number, model.vocabulary)
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        loss = parallel(*model.inputs(rows[:, :-1]), labels=rows[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([parallel])
        optimizer.step()
        return loss.item()

    def save(place: Path, number: int) -> None:
        metadata: dict[str, Any] = dict(run.metadata)
        if run.sharding:
            metadata["distrib_optim_sharding_type"] = run.sharding
        place.mkdir(parents=True, exist_ok=True)
        state = model.module.sharded_state_dict(metadata=dict(metadata))
        content = {
            "model": state,
            "optimizer": optimizer.sharded_state_dict(state, metadata=dict(metadata)),
            "iteration": number,
            "checkpoint_version": 3.0,
        }
        dist_checkpointing.save(content, str(place), content_metadata=metadata)
        dist.barrier()

    losses = [step(number) for number in range(1, STEPS + 1)]
    save(folder / "trained" / f"iter_{STEPS:07d}", STEPS)
    logits["trained"] = model.logits()
    losses.append(step(STEPS + 1))
    save(folder / "next", STEPS + 1)
    if dist.get_rank() == 0:
        (folder / "trained" / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        (folder / "losses.json").write_text(json.dumps(losses))
        torch.save(logits, folder / "logits.pt")
        print("trained", run.name, losses, flush=True)


def load(run: Run, folder: Path) -> None:
    """Load what Cairn exported after more training, and write its logits."""
    model = Model(run, folder / "back", run.loaded, 1)
    model.load(folder / "back" / "release")
    logits = model.logits()
    if dist.get_rank() == 0:
        torch.save(logits, folder / "logits_back.pt")
        print("loaded", run.name, "with tensor parallelism", run.loaded, flush=True)


def main() -> None:
    """Run the command."""
    import megatron.core

    use_cpu()
    dist.init_process_group("gloo")
    command, folder = {"train": train, "load": load}[sys.argv[1]], Path(sys.argv[2])
    if dist.get_rank() == 0:
        print("megatron-core", megatron.core.__version__, "torch", torch.__version__, flush=True)
    for run in RUNS:
        if (folder / run.name).is_dir():
            command(run, folder / run.name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # what saves starts processes that import this module
    main()
