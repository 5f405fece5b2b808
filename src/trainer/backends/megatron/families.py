"""Which models megatron-core's GPT model can be, and the sizes it gets; needs no megatron-core itself."""

import importlib.util
from typing import Any

import torch
from transformers import PreTrainedConfig

from cairn.config.parallel import ParallelConfig
from cairn.run.errors import UsageError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""transformers' `model_type` of the models that are trained with it."""
INSTALL = "uv sync --inexact --group megatron"
"""The command that installs it."""


def check_megatron(
    about: PreTrainedConfig, parallel: ParallelConfig, router_aux_coef: float, *, recomputes: bool = False
) -> None:
    """Check that megatron-core is installed and can train a model on ranks that share its matrices.

    Args:
        about: the model's configuration.
        parallel: what the ranks share.
        router_aux_coef: the weight of the load-balancing loss, of which the model may have one of its own.
        recomputes: whether layers are computed once more in the backward pass.

    Raises:
        UsageError: it is not, or it can't.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UsageError(
            f"backend = 'megatron': megatron-core is not installed; `{INSTALL}` installs it, or leave out "
            "backend"
        )
    problem = problem_of(about, parallel, router_aux_coef)
    if problem is None and recomputes and router_aux_coef:
        problem = (
            f"router_aux_coef = {router_aux_coef:g} is the weight of a loss of the routers' logits, which "
            "layers that are computed once more (activation_checkpointing) give without a gradient"
        )
    if problem:
        raise UsageError(
            f"backend = 'megatron' can't train the model: {problem}; change that, or leave out backend"
        )


def problem_of(about: PreTrainedConfig, parallel: ParallelConfig, router_aux_coef: float) -> str | None:
    """Why megatron-core's model would not be the one that a configuration describes, or can't be shared.

    Its attention and layers know more variants than are mapped here. Whatever is not mapped is refused.
    """
    of: Any = about  # each model type has its own class
    tensor = parallel.tensor
    if of.model_type not in FAMILIES:
        return (
            f"model_type is {of.model_type!r}, and {', '.join(FAMILIES)} are what is mapped to its GPT model"
        )
    rope: dict[str, Any] = getattr(of, "rope_parameters", None) or {}
    layers = set(getattr(of, "layer_types", None) or ()) - {"full_attention"}
    wrong = {
        "hidden_act": of.hidden_act != "silu",
        "attention_dropout": bool(getattr(of, "attention_dropout", 0.0)),
        "attention_bias": bool(getattr(of, "attention_bias", False)),
        "mlp_bias": bool(getattr(of, "mlp_bias", False)),
        "pretraining_tp": getattr(of, "pretraining_tp", 1) not in (None, 1),
        "layer_types": bool(layers),
        "rope_parameters": rope.get("rope_type", "default") != "default"
        or rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if has_experts(about):
        if tensor > 1:
            return (
                f"parallel.tensor = {tensor} cuts experts with sequence parallelism alone, which was not "
                "tried; parallel.expert deals them out"
            )
        wrong |= {
            "mlp_only_layers": bool(of.mlp_only_layers),
            "decoder_sparse_step": of.decoder_sparse_step != 1,
            # Weights of routing that are 1 whatever the router says.
            "num_experts_per_tok": of.norm_topk_prob and of.num_experts_per_tok == 1,
        }
    for name, is_wrong in wrong.items():
        if is_wrong:
            return f"{name} = {getattr(of, name)!r} in its config.json is not mapped to megatron-core"
    stages = parallel.pipeline
    if of.num_hidden_layers % stages:
        layers = of.num_hidden_layers
        return f"its {layers} layers can't be shared equally by parallel.pipeline = {stages} stages"
    if stages > 1 and router_aux_coef:
        return (
            f"router_aux_coef = {router_aux_coef:g} is the weight of a loss of all layers' routers together, "
            f"and each of parallel.pipeline = {stages} stages has those of its own layers; set it to 0"
        )
    shared = {
        "attention heads": of.num_attention_heads,
        "key-value heads": of.num_key_value_heads,
        "features of the MLP": of.intermediate_size,
        "tokens of the vocabulary": of.vocab_size,
    }
    for what, count in shared.items():
        if count % tensor:
            return f"its {count} {what} can't be shared equally by parallel.tensor = {tensor} ranks"
    return None


def has_experts(about: PreTrainedConfig) -> bool:
    """Whether a token passes through some of several experts."""
    return about.model_type == "qwen3_moe"


def looked_up(embeddings: torch.Tensor, token_ids: torch.Tensor, unlearned: int | None) -> torch.Tensor:
    """Embeddings [..., H] of tokens [...] as transformers learns them.

    Args:
        unlearned: the token that pads: its embedding is looked up, and learns nothing from that.
    """
    if unlearned is None:
        return embeddings
    return torch.where((token_ids == unlearned)[..., None], embeddings.detach(), embeddings)


def arguments_of(about: PreTrainedConfig) -> dict[str, Any]:
    """Arguments of megatron-core's TransformerConfig that say which model it is."""
    of: Any = about
    experts: dict[str, Any] = {}
    if has_experts(about):
        experts = {
            "num_moe_experts": of.num_experts,
            "moe_ffn_hidden_size": of.moe_intermediate_size,
            "moe_router_topk": of.num_experts_per_tok,
            # Probabilities of all experts, or those of the chosen ones alone, which add up to 1.
            "moe_router_pre_softmax": not of.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
        }
    return {
        "num_layers": of.num_hidden_layers,
        "hidden_size": of.hidden_size,
        "ffn_hidden_size": of.intermediate_size,
        "num_attention_heads": of.num_attention_heads,
        "num_query_groups": of.num_key_value_heads,
        "kv_channels": getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads,
        "layernorm_epsilon": of.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": of.model_type in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": of.model_type == "qwen2",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        **experts,
    }
