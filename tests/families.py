"""Tiny models of many families, made from a configuration and a seed, in the layout of published models.

They have two layers, one token per character, and heads of 32 (the smallest that vLLM's CPU attention takes).
A folder holds what `save_pretrained` writes, with the hub's tensor names and layout, and the example task's
tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import VOCABULARY, random_model, write
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SIZE = {
    **SPECIAL,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 32}
PLAIN = {**SIZE, "num_key_value_heads": 2}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
GPT = {**SPECIAL, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.15}
DEEPSEEK = {
    **PLAIN,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
MAMBA = {
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@dataclass(frozen=True)
class Family:
    """A model family: transformers' `model_type`, its kind, and the settings of the tiny configuration."""

    model_type: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    # Dense
    "llama": Family("llama", "dense", SIZE),
    "llama_bias": Family("llama", "dense", {**SIZE, "attention_bias": True, "mlp_bias": True}),
    "qwen2": Family("qwen2", "dense", SIZE),
    "qwen3": Family("qwen3", "dense", {**SIZE, **HEAD}),
    "qwen3_tied": Family("qwen3", "dense", {**SIZE, **HEAD, "tie_word_embeddings": True}),
    "mistral": Family("mistral", "dense", {**SIZE, **HEAD, "sliding_window": None}),
    "gemma": Family("gemma", "dense", {**SIZE, **HEAD, "tie_word_embeddings": True}),
    "phi": Family("phi", "dense", {**PLAIN, "partial_rotary_factor": 0.5}),
    "phi3": Family("phi3", "dense", {**SIZE, "sliding_window": None}),
    "olmo2": Family("olmo2", "dense", SIZE),
    "granite": Family(
        "granite",
        "dense",
        {**SIZE, "attention_multiplier": 0.2, "logits_scaling": 2.0, "embedding_multiplier": 2.0},
    ),
    "cohere": Family("cohere", "dense", {**SIZE, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "stablelm": Family("stablelm", "dense", {**PLAIN, "partial_rotary_factor": 0.5}),
    "gpt_neox": Family("gpt_neox", "dense", PLAIN),
    "starcoder2": Family("starcoder2", "dense", {**SIZE, "sliding_window": None}),
    "glm4": Family("glm4", "dense", {**SIZE, **HEAD}),
    "smollm3": Family("smollm3", "dense", {**SIZE, "no_rope_layers": [1, 0]}),
    "nemotron": Family("nemotron", "dense", {**SIZE, **HEAD}),
    # Positions that do not come from position_ids alone
    "gpt2": Family("gpt2", "learned positions", GPT),
    "opt": Family(
        "opt",
        "learned positions",
        {**SPECIAL, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"max_position_embeddings": 256, "word_embed_proj_dim": 64, "init_std": 0.15},
    ),
    "falcon": Family(
        "falcon",
        "rotary",
        {**SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"multi_query": True, "parallel_attn": True, "bias": False, "initializer_range": 0.15},
    ),
    "falcon_alibi": Family(
        "falcon",
        "ALiBi",
        {**SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True}
        | {"multi_query": True, "parallel_attn": False, "bias": True, "initializer_range": 0.15},
    ),
    "bloom": Family(
        "bloom",
        "ALiBi",
        {**SPECIAL, "hidden_size": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.15},
    ),
    "gptj": Family("gptj", "dense", {**GPT, "rotary_dim": 16}),
    "gpt_bigcode": Family("gpt_bigcode", "learned positions", GPT),
    "xglm": Family(
        "xglm",
        "fixed positions",
        {**SPECIAL, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 2}
        | {"max_position_embeddings": 256, "init_std": 0.15},
    ),
    "biogpt": Family("biogpt", "learned positions", PLAIN),
    "mpt": Family(
        "mpt",
        "ALiBi",
        {
            **SPECIAL,
            "d_model": 64,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 256,
            "initializer_range": 0.15,
        },
    ),
    # Sliding windows, soft-capping, sinks
    "mistral_sliding": Family("mistral", "sliding window", {**SIZE, **HEAD, "sliding_window": 8}),
    "gemma2": Family(
        "gemma2",
        "soft-capped",
        {**SIZE, **HEAD, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3_text": Family(
        "gemma3_text",
        "sliding window",
        {**SIZE, **HEAD, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "vaultgemma": Family(
        "vaultgemma",
        "soft-capped",
        {**SIZE, **HEAD, "sliding_window": 8, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0},
    ),
    "cohere2": Family("cohere2", "sliding window", {**SIZE, **HEAD, **WINDOW, "tie_word_embeddings": True}),
    "exaone4": Family("exaone4", "sliding window", {**SIZE, **HEAD, **WINDOW}),
    "olmo3": Family("olmo3", "sliding window", {**SIZE, **WINDOW}),
    "llama4": Family(
        "llama4_text",
        "chunked attention, MoE",
        {**SIZE, **HEAD, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1},
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "MoE",
        {**SIZE, **HEAD, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    # Mixtures of experts
    "qwen2_moe": Family(
        "qwen2_moe", "MoE", {**SIZE, **MOE, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
    ),
    "qwen3_moe": Family("qwen3_moe", "MoE", {**SIZE, **HEAD, **MOE}),
    "mixtral": Family("mixtral", "MoE", {**SIZE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": Family("olmoe", "MoE", {**PLAIN, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": Family(
        "granitemoe",
        "MoE",
        {**SIZE, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    ),
    "deepseek_v2": Family("deepseek_v2", "MoE", DEEPSEEK),
    "deepseek_v3": Family(
        "deepseek_v3", "MoE", {**DEEPSEEK, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc"}
    ),
    "glm4_moe": Family(
        "glm4_moe",
        "MoE",
        {**SIZE, **HEAD, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "phimoe": Family("phimoe", "MoE", {**SIZE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        "MoE",
        {**SIZE, **HEAD, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "afmoe": Family(
        "afmoe",
        "sliding window, MoE",
        {**SIZE, **HEAD, **WINDOW, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        | {"num_shared_experts": 1, "num_dense_layers": 1},
    ),
    # State carried from token to token
    "mamba": Family(
        "mamba",
        "state space",
        {**SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "initializer_range": 0.15},
    ),
    "mamba2": Family(
        "mamba2",
        "state space",
        {**SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 4}
        | {"head_dim": 32, "n_groups": 1, "chunk_size": 8, "initializer_range": 0.15},
    ),
    "lfm2": Family(
        "lfm2",
        "convolution hybrid",
        {**SIZE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        "convolution hybrid, MoE",
        {**SIZE, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "num_dense_layers": 1, "tie_word_embeddings": True},
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        "linear attention hybrid",
        {**SIZE, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5": Family("qwen3_5_text", "linear attention hybrid", {**SIZE, **HEAD, **LINEAR}),
    "minimax": Family(
        "minimax",
        "linear attention hybrid, MoE",
        {**SIZE, **HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_next": Family(
        "qwen3_next",
        "linear attention hybrid, MoE",
        {**SIZE, **HEAD, **MOE, **LINEAR, "shared_expert_intermediate_size": 32},
    ),
    "falcon_h1": Family(
        "falcon_h1", "state space hybrid", {**SIZE, **HEAD, **MAMBA, "mamba_d_ssm": 128, "mamba_expand": 2}
    ),
    "bamba": Family(
        "bamba", "state space hybrid", {**SIZE, **MAMBA, "mamba_expand": 2, "attn_layer_indices": [1]}
    ),
    "nemotron_h": Family(
        "nemotron_h",
        "state space hybrid",
        {**SIZE, **HEAD, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4}
        | {"mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8},
    ),
    "jamba": Family(
        "jamba",
        "state space hybrid, MoE",
        {**SIZE, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "state space hybrid, MoE",
        {**SIZE, **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
        | {"layer_types": ["mamba", "attention"], "mamba_expand": 2, "attention_multiplier": 0.2},
    ),
    # The text part of a multimodal model
    "gemma3": Family(
        "gemma3",
        "multimodal",
        {
            "text_config": {**SIZE, **HEAD, "sliding_window": 8, "query_pre_attn_scalar": 32}
            | {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
            "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
            | {"num_attention_heads": 1, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_index": 98,
            "boi_token_index": 99,
            "eoi_token_index": 100,
        },
    ),
}


UNSERVED = {
    "deepseek_v2": "is not supported by MLA",
    "deepseek_v3": "is not supported by MLA",
    "mamba": "no attribute 'selective_scan_fwd'",
    "lfm2": "no attribute 'conv_dim'",
    "qwen3_next": "CPU GDN attention requires BF16",
    "bamba": "does not dispatch through the Transformers attention interface",
    "jamba": "no attribute 'selective_scan_fwd'",
    "gemma3": "Can't load image processor",
    "xglm": "XGLMForCausalLM'] are not supported",
    "biogpt": "no module or parameter named 'output_projection'",
    "mpt": "MptForCausalLM was supported",
    "llama4": "is not divisible by block_size",
    "phimoe": "too many values to unpack",
    "afmoe": "no attribute 'score_func'",
    "olmo_hybrid": "no attribute 'set_allocator'",
    "qwen3_5": "CPU GDN attention requires BF16",
    "minimax": "does not dispatch through the Transformers attention interface",
}
"""The error of vLLM's CPU build for each family that it can't serve, in float32 and at this size."""
SERVED = {
    **dict.fromkeys(FAMILIES, "yes"),
    **dict.fromkeys(UNSERVED, "not on CPU"),
    "qwen3_next": "not on CPU in float32",
    "qwen3_5": "not on CPU in float32",
    "llama4": "not with chunks below 128",
    "gemma3": "not tried",
    "bloom": "up to 3e-4",
    "nemotron_h": "up to 3e-4",
}
"""Last column of docs/reference/models.md's table; tests/integration/test_served_families.py checks it."""
STATE = ("no: state from token to token", "carry state from token to token")
DROPOUT = ("no: dropout or noise", "it has dropout")
OWN = ("no: attention of its own", "the model's forward pass fails|logprobs of samples differ")
UNSHARED = {
    "stablelm": ("no: layers get no arguments", "does not hand its layers which ranks"),
    "nemotron": ("no: layers get no arguments", "does not hand its layers which ranks"),
    "llama4": ("no: chunked attention", "chunked_attention"),
    **dict.fromkeys(("gpt2", "opt", "gpt_bigcode", "xglm", "biogpt", "phimoe"), DROPOUT),
    **dict.fromkeys(("falcon", "falcon_alibi", "bloom", "gptj", "mpt"), OWN),
    **dict.fromkeys(("mamba", "mamba2", "lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5", "minimax"), STATE),
    **dict.fromkeys(("qwen3_next", "falcon_h1", "bamba", "nemotron_h", "jamba", "granitemoehybrid"), STATE),
}
"""Families whose rows ranks can't share: the column `context` of docs/reference/models.md's table, and what
the error has; tests/integration/test_step_ranks.py checks it."""


NO_PLAN = ("no: no plan", "has no plan that says how its layers are cut")
KIND = ("no: state from token to token", "layers of the kind [a-z_]+ were not tried")
NOT_BOTH = {
    **dict.fromkeys(("gpt_oss", "phimoe", "afmoe"), NO_PLAN),
    "deepseek_v2": ("no: MLA's own cut", "in a way that was not tried"),
    **dict.fromkeys(("lfm2_moe", "minimax", "qwen3_next"), KIND),
}
"""Mixtures of experts whose other matrices ranks can't share while they have the experts together."""
HAS_EXPERTS = "its layers have experts"
NO_EXPERTS = ("no: no experts", "its layers have no experts")
NOT_SENT = ("no: no plan", "has no plan by which tokens travel to its experts")
UNSENT = ("llama4", "granitemoe", "jamba", "granitemoehybrid")
STACKS = ("no: several stacks of layers", "it has more than one stack of layers")
UNDIVIDED = {
    **dict.fromkeys(("stablelm", "nemotron", "gpt2", "opt", "falcon", "falcon_alibi", "bloom"), NO_PLAN),
    **dict.fromkeys(("gptj", "gpt_bigcode", "xglm", "mpt"), NO_PLAN),
    **dict.fromkeys(("biogpt", "gemma3"), STACKS),
    **{
        name: (NOT_BOTH[name][0] if name in NOT_BOTH else "with expert", HAS_EXPERTS)
        for name, about in FAMILIES.items()
        if "MoE" in about.kind
    },
    **dict.fromkeys(UNSENT, ("no: experts", HAS_EXPERTS)),
    **dict.fromkeys(("mamba", "mamba2", "lfm2", "olmo_hybrid", "qwen3_5", "falcon_h1", "bamba"), KIND),
    "nemotron_h": KIND,
}
"""The same of layers whose matrices ranks can't share, or only if they share experts: the column `tensor`."""


UNDEALT = {
    **{name: NO_EXPERTS for name, about in FAMILIES.items() if "MoE" not in about.kind},
    **dict.fromkeys(UNSENT, NOT_SENT),
}
"""The same of experts that ranks can't have together: the column `expert`."""


CHOICE = ("no: chooses in its own way", "chooses experts in a way of its own|are not those that are replayed")
UNREPLAYED = {
    **{name: NO_EXPERTS for name, about in FAMILIES.items() if "MoE" not in about.kind},
    **dict.fromkeys(("llama4", "phimoe"), CHOICE),
}
"""The same of experts whose choice can't be replayed: the column `replay`; tests/unit/test_router_replay.py
checks it."""


def make_config(family: str, **changed: Any) -> PreTrainedConfig:
    """The tiny configuration of a family."""
    about = FAMILIES[family]
    return AutoConfig.for_model(about.model_type, **about.settings | changed)


def make_model(family: str, seed: int = 0, **changed: Any) -> PreTrainedModel:
    """The model, float32, with random weights, also where models begin with zeros or ones (biases, norms)."""
    generator = torch.Generator().manual_seed(seed)
    model = random_model(make_config(family, **changed), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer += torch.randn(buffer.shape, generator=generator) * 0.1
    return model.eval()


def make(family: str, folder: Path, seed: int = 0) -> Path:
    """Write the model as a Hugging Face directory into `folder`, in the hub's layout; returns the folder."""
    return write(make_model(family, seed), folder)
