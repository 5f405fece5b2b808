"""megatron-core's GPT model of a Hugging Face configuration, and the optimiser that shards its state.

Layers are those of megatron-core's local specification, but for attention, which is Cairn's own
(`trainer/attention`): its kernels keep the samples of a row apart without masks. Tokens travel to their
experts in an all-to-all, and none is dropped.
"""

# megatron-core is an optional dependency, without types.
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.config.optimizer import BaseOptimizerConfig
from cairn.config.trainer import TrainerBase
from cairn.formats.common.value_head import WEIGHT
from cairn.trainer.attention.choice import Attention, Device, choose
from cairn.trainer.backends.megatron.families import arguments_of, looked_up
from cairn.trainer.backends.megatron.stages import OneStage, Pipeline, Stages
from cairn.trainer.backends.megatron.without_gpu import without_gpu
from cairn.trainer.group import Axis, RankGroup
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import MicroBatch

CUT = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
"""The modules whose matrices ranks share, and which dimension is cut."""


def join_ranks(group: RankGroup) -> None:
    """Make megatron-core's process groups, once for each process group of torch's.

    Neighbouring ranks share matrices, as everywhere in Cairn; the ranks of a stage are neighbours, too.
    """
    world = dist.group.WORLD
    if _JOINED.get("world") is world:
        return
    if parallel_state.model_parallel_is_initialized():  # of ranks of which one has died since
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        group.tensor.size,
        group.pipeline.size,
        expert_model_parallel_size=group.expert.size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(group.patience.total_seconds() // 60)),
    )
    # Dropout is refused, so that nothing is drawn; this tracker keeps no states of CUDA's generators.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _JOINED["world"] = world


_JOINED: dict[str, Any] = {}


class MegatronModel(torch.nn.Module):
    """What computes on this rank, and its gradients.

    config: transformers' configuration of the model. gpt: megatron-core's model, or this rank's part.
    ddp: its buffers of weights and gradients. distributed: its optimiser, once `make_distributed` has run.
    """

    def __init__(self, outline: PreTrainedModel, config: TrainerBase, group: RankGroup):
        """Allocate it; its weights have no values yet.

        Args:
            outline: on the meta device: transformers' model of the same configuration, or its layers with a
                head of one output.
        """
        super().__init__()
        about: PreTrainedConfig = outline.config
        self.unlearned: int | None = getattr(outline.get_input_embeddings(), "padding_idx", None)
        """The token whose embedding transformers does not learn where it is looked up."""
        self.stages: Stages = OneStage(group.device)
        """Through which micro-batches go."""
        if group.pipeline.size > 1:
            ranks: Any = parallel_state.get_pipeline_model_parallel_group()
            self.stages = Pipeline(group.pipeline, ranks, group.device)
        precision = config.precision.settled(gpu=group.device.type == "cuda")
        compute = DTYPES_IN_SETTINGS[precision.compute]
        self.config, self.device, self.tensor = about, group.device, group.tensor
        self.kind = type(outline)
        """transformers' class of the model."""
        self.head_in_float32 = precision.head == "float32"
        self.gives_values = getattr(outline.get_output_embeddings(), "out_features", None) == 1
        """Whether its head has one output, in the place of logits."""
        layers = getattr(outline, "decoder", outline)
        self.kernel = choose(config.attention, layers, Device.of(group.device, compute))
        """The kernel that should compute attention, and why, as `choose` says it."""
        self._longest = config.seq_len
        kind = arguments_of(about)
        recompute: dict[str, Any] = {}
        if config.activation_checkpointing:  # each layer keeps its input alone, as with FSDP2
            recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
            recompute["recompute_num_layers"] = 1
        settings = TransformerConfig(
            **kind,
            **recompute,
            activation_func=torch.nn.functional.silu,
            tensor_model_parallel_size=group.tensor.size,
            expert_model_parallel_size=group.expert.size,
            pipeline_model_parallel_size=group.pipeline.size,
            pipeline_dtype=compute,
            variable_seq_lengths=group.pipeline.size > 1,
            params_dtype=compute,
            bf16=compute == torch.bfloat16,
            attention_softmax_in_fp32=True,
            use_cpu_initialization=group.device.type == "cpu",
            perform_initialization=False,
            deterministic_mode=config.deterministic and group.device.type == "cuda",
            # Fused kernels are those of Apex and TransformerEngine.
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
        )
        rope: dict[str, Any] = getattr(about, "rope_parameters", None) or {}
        tied = bool(getattr(about, "tie_word_embeddings", False)) and not self.gives_values
        layer: Any = get_gpt_layer_local_spec(
            num_experts=kind.get("num_moe_experts"),
            qk_layernorm=kind["qk_layernorm"],
            normalization="RMSNorm",
        )
        layer.submodules.self_attention.submodules.core_attention = HeadsAttention
        if "num_moe_experts" in kind:
            layer.submodules.mlp.submodules.router = Router
        with without_gpu(group.device):
            gpt = GPTModel(
                config=settings,
                transformer_layer_spec=layer,
                vocab_size=about.vocab_size,
                max_sequence_length=config.seq_len,
                position_embedding_type="rope",
                rotary_base=rope.get("rope_theta", 10000.0),
                share_embeddings_and_output_weights=tied,
                pre_process=self.stages.first,
                post_process=self.stages.last,
            ).to(group.device, compute)  # norms are made in float32
            if self.gives_values and self.stages.last:
                head: Any = OneOutput(about.hidden_size, device=group.device, dtype=compute)
                gpt.output_layer = head
            if "num_moe_experts" in kind and group.device.type == "cpu":
                for block in gpt.decoder.layers:
                    own: Any = block.mlp
                    groups = get_default_pg_collection()
                    own.token_dispatcher = Sender(
                        own.num_local_experts, own.local_expert_indices, settings, groups
                    )
            for module in gpt.modules():  # which megatron-core notes only where it draws initial values
                if type(module) in CUT and module.weight is not None:
                    set_tensor_model_parallel_attributes(module.weight, True, CUT[type(module)], 1)
            how = DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=precision.reduce == "float32"
            )
            ddp = DistributedDataParallel(settings, how, gpt)
        self.gpt: Any = gpt
        self.names = names_of(gpt, group.expert)
        """megatron-core's of its parameters, with the numbers of layers and experts in the whole model."""
        self.twice = {name for one, name in self.names.items() if getattr(one, "shared_embedding", False)}
        """Of an embedding that is the head as well, and is on the first stage and on the last one."""
        self.__dict__["ddp"] = ddp  # has `gpt` as a module of its own
        self.distributed: Any = None

    def forward(
        self, micro: MicroBatch, attention: Attention, *, output_router_logits: bool = False
    ) -> "Outputs":
        """Hidden states for the head, and the routers' logits if they are asked for.

        Where it has no head, there are none, and those of all tokens are left to `stages`.

        Args:
            attention: what layers compute attention with.
        """
        found: list[torch.Tensor] = []
        routed: list[torch.Tensor] = []

        def route(router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            routed.append(router.gating(inputs[0]).transpose(0, 1).flatten(0, 1))

        def select(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
            found.append(inputs[0].transpose(0, 1).flatten(0, 1)[micro.learned - 1])
            return inputs[0][:0], *inputs[1:]

        def look_up(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], found: torch.Tensor) -> Any:
            return looked_up(found, inputs[0], self.unlearned)

        def place(rotary: torch.nn.Module, inputs: tuple[Any, ...], found: torch.Tensor) -> Any:
            """Of each token, [T, R, 1, d], in the place of each position, [S, 1, 1, d]."""
            return found[micro.position_ids.T, 0]

        hooks: list[Any] = [self.gpt.rotary_pos_emb.register_forward_hook(place)]
        if self.stages.first:
            hooks.append(self.gpt.embedding.word_embeddings.register_forward_hook(look_up))
        if self.stages.last:
            hooks.append(self.gpt.output_layer.register_forward_pre_hook(select))
        if output_router_logits:
            routers = [layer.mlp.router for layer in self.gpt.decoder.layers]
            hooks += [router.register_forward_pre_hook(route) for router in routers]
        try:
            rows = PackedRows.of(micro, attention, self._longest)
            hidden = self.gpt(micro.input_ids, micro.position_ids, None, packed_seq_params=rows)
        finally:
            for hook in hooks:
                hook.remove()
        if not self.stages.last:
            self.stages.passed = hidden
            return Outputs(None, tuple(routed))
        return Outputs(found[0], tuple(routed))

    @property
    def first_layer(self) -> int:
        """The number of this rank's first layer in the whole model."""
        return self.gpt.decoder.layers[0].layer_number - 1

    def head_weight(self) -> torch.Tensor:
        """As `head` takes it: [V / ranks, H], or [1, H] for values."""
        tied = self.gpt.share_embeddings_and_output_weights
        weight = self.gpt.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
        return weight.float() if self.head_in_float32 or self.gives_values else weight

    def head(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Of hidden states [L, H], this rank's part of the vocabulary's logits, [L, V / ranks]; or values,
        [L, 1], on all ranks that share matrices."""
        if not self.gives_values:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return torch.nn.functional.linear(hidden.to(weight.dtype), weight)


@dataclass
class PackedRows(PackedSeqParams):
    """What layers are told of the rows of a micro-batch: how attention of their samples is computed.

    It stands among the arguments of a pass, since layers may be computed once more in its backward pass.
    """

    attend: Callable[..., tuple[torch.Tensor, None]] | None = None
    """Computes attention of queries [R, heads, T, d], and of keys and values: [R, T, heads, d]."""

    @classmethod
    def of(cls, micro: MicroBatch, attention: Attention, longest: int) -> "PackedRows":
        """Of these rows.

        Args:
            longest: tokens of a sample for which megatron-core keeps angles of rotary embeddings.
        """
        function = ALL_ATTENTION_FUNCTIONS[attention.name]
        longest = max(longest, micro.longest)
        return cls(
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attend=partial(function, attention_mask=None, **attention.arguments(micro)),
        )


class HeadsAttention(torch.nn.Module):
    """Attention of the heads that this rank has of a layer, as FSDP2's layers have it computed."""

    def __init__(self, config: Any, **about: Any):
        """Take what megatron-core tells its own attention, of which the size of heads counts."""
        super().__init__()
        self._scale: float = config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        *,
        packed_seq_params: PackedRows,
        **about: Any,
    ) -> torch.Tensor:
        """The results of all heads, [T, R, heads * d], of queries [T, R, heads, d], and of keys and values
        [T, R, fewer heads, d]."""
        states = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        assert packed_seq_params.attend is not None
        found, _ = packed_seq_params.attend(self, *states, scaling=self._scale)
        return found.transpose(0, 1).flatten(2)


class OneOutput(torch.nn.Linear):
    """The head of a reward model, in the place of megatron-core's; `MegatronModel.head` computes with it."""

    def __init__(self, width: int, *, device: torch.device, dtype: torch.dtype):
        """Of hidden states of this width; without a bias."""
        super().__init__(width, 1, bias=False, device=device, dtype=dtype)

    def forward(self, hidden: torch.Tensor, **_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (as megatron-core calls it)
        """Nothing: hidden states, and no bias."""
        return hidden, None


class Router(TopKRouter):
    """megatron-core's router of tokens to experts, with logits computed as in transformers' models.

    Its own function for that takes TransformerEngine.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """The logits of all experts: [T, R, experts], of hidden states [T, R, H]."""
        return torch.nn.functional.linear(input, self.weight)


class Sender(MoEAlltoAllTokenDispatcher):
    """What sends tokens to the ranks that have their experts, on a CPU.

    An all-to-all wants counts as numbers, and megatron-core fetches them from a GPU alone.
    """

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> Any:
        """Send hidden states [tokens, H], and their weights of routing [tokens]."""
        for name in ("input_splits", "output_splits"):
            if isinstance(counts := getattr(self, name), torch.Tensor):
                setattr(self, name, counts.tolist())
        return super().token_dispatch(permutated_local_input_tokens, permuted_probs)


class Outputs(NamedTuple):
    """What a forward pass gives.

    hidden: states of the last layer from which learned tokens are predicted, [L, H]; None if this rank has no
    head.
    router_logits: of each layer, [R * T, experts], in the order of the tokens, as transformers' models give
    them; none unless they are asked for.
    """

    hidden: torch.Tensor | None
    router_logits: tuple[torch.Tensor, ...]


def names_of(gpt: GPTModel, expert: Axis) -> dict[torch.nn.Parameter, str]:
    """Names of the parameters on this rank, which itself counts its own layers and experts from 0."""

    def whole(name: str) -> str:
        at = name.split(".")
        if at[0] == "output_layer" and isinstance(gpt.output_layer, OneOutput):
            return WEIGHT
        if at[:2] == ["decoder", "layers"]:
            layer: Any = gpt.get_submodule(".".join(at[:3]))
            at[2] = str(layer.layer_number - 1)
            if "local_experts" in at:
                at[5:7] = ["experts", str(expert.rank * layer.mlp.num_local_experts + int(at[6]))]
        return ".".join(at)

    return {parameter: whole(name) for name, parameter in gpt.named_parameters()}


def make_distributed(model: MegatronModel, config: BaseOptimizerConfig) -> torch.optim.Optimizer:
    """Give the model its optimiser; returns the one within, whose parameters are this rank's shards.

    These are float32: views of the weights if the model computes in float32, else master weights.
    """
    bf16 = model.gpt.config.bf16
    groups: Any = parallel_state  # whose functions may also return numbers of ranks
    nothing: Any = None
    how = OptimizerConfig(
        use_distributed_optimizer=True, bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32
    )
    inner = make_optimizer(((name, parameter) for parameter, name in model.names.items()), config)
    ddp = model.__dict__["ddp"]
    # Which ranks have shards of a buffer the buffer itself knows: of experts, those that have the same ones.
    # The numbers would be those of parts of the model on this rank.
    buffers = {0: ddp.buffers, 1: ddp.expert_parallel_buffers}
    with without_gpu(model.device):
        model.distributed = DistributedOptimizer(
            inner,
            how,
            grad_scaler=nothing,
            init_state_fn=nothing,
            model_chunks=[ddp],
            per_model_buffers=buffers,
            data_parallel_group=groups.get_data_parallel_group(with_context_parallel=True),
            data_parallel_group_gloo=None,
            data_parallel_group_idx=groups.get_model_parallel_group().rank(),
            distributed_optimizer_instance_id=0,
        )
    return model.distributed.optimizer
