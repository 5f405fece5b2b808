"""The models that GGUF files describe: their tensors, and the metadata that stands for config.json.

Programs that run GGUF files compute what the architecture's name and the metadata say, and ignore the rest
of a configuration. So one is written only if the metadata makes the same one again (`metadata_of`).
"""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.common.tensor_views import Joined, RotaryRows, TensorSection
from cairn.formats.gguf.gguf_file import GgufFile
from cairn.model.architectures import (
    ARCHITECTURES,
    NORMS,
    ModelTensor,
    Names,
    Role,
    architecture_of,
    sizes_of,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_BLOCK = "blk.{layer}"
_TEMPLATES: dict[Role, str] = {
    "embedding": "token_embd",
    "attention_norm": f"{_BLOCK}.attn_norm",
    "attention.query": f"{_BLOCK}.attn_q",
    "attention.key": f"{_BLOCK}.attn_k",
    "attention.value": f"{_BLOCK}.attn_v",
    "attention.output": f"{_BLOCK}.attn_output",
    "attention.query_norm": f"{_BLOCK}.attn_q_norm",
    "attention.key_norm": f"{_BLOCK}.attn_k_norm",
    "attention.after_norm": f"{_BLOCK}.post_attention_norm",
    "mlp_norm": f"{_BLOCK}.ffn_norm",
    "mlp.gate": f"{_BLOCK}.ffn_gate",
    "mlp.up": f"{_BLOCK}.ffn_up",
    "mlp.down": f"{_BLOCK}.ffn_down",
    "mlp.after_norm": f"{_BLOCK}.post_ffw_norm",
    "router": f"{_BLOCK}.ffn_gate_inp",
    "expert.gate": f"{_BLOCK}.ffn_gate_exps",
    "expert.up": f"{_BLOCK}.ffn_up_exps",
    "expert.down": f"{_BLOCK}.ffn_down_exps",
    "final_norm": "output_norm",
    "head": "output",
}
GGUF_NAMES = Names(_TEMPLATES)
"""The names in GGUF files. The experts of a layer are one tensor [experts, ...]."""
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""transformers' `model_type` by GGUF's name of the architecture."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by whose values rotary frequencies are divided: what `llama3` scaling comes to."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_HEAD = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_WINDOW = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
_KEYS: dict[str, dict[str, str]] = {
    "llama": _SIZES | _HEAD | {"rope.dimension_count": "head_dim"},
    "qwen2": _SIZES,
    "qwen3": _SIZES | _HEAD,
    "qwen3moe": _SIZES
    | _HEAD
    | {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gemma": _SIZES | _HEAD,
    "gemma2": _SIZES | _HEAD | _WINDOW | {"attn_logit_softcapping": "attn_logit_softcapping"},
    "gemma3": _SIZES | _HEAD | _WINDOW,
}
"""The settings of config.json by the key in the metadata, without the architecture's name."""
_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Every so manieth layer attends to all tokens, where `sliding_window_pattern` does not say otherwise."""
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
"""Models with so many layers (the 27B) divide queries by the root of hidden size / heads, not of a head's."""
_YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_NO_PART_IN_COMPUTING = {
    *("architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "label2id"),
    *(
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
    ),
    *("pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef", "transformers_version"),
    *("attention_dropout", "use_cache", "_name_or_path", "model_type", "sep_token_id", "unk_token_id"),
}


def metadata_of(config: "PreTrainedConfig", names: Collection[str]) -> dict[str, Any]:
    """The metadata of a model's architecture, `general.architecture` among them.

    Args:
        names: of the tensors in the GGUF file.

    Raises:
        CheckpointError: the model has a setting that can't be said in GGUF; the message lists all of them.
    """
    architecture_of(config, MODEL_TYPES.values())
    arch = next(name for name, model_type in MODEL_TYPES.items() if model_type == config.model_type)
    given = config.to_dict()
    sizes = sizes_of(config)
    about: dict[str, Any] = {key: getattr(config, name, None) for key, name in _KEYS[arch].items()}
    about |= {"attention.key_length": sizes.head, "attention.value_length": sizes.head}
    if "rope.dimension_count" in about:
        about["rope.dimension_count"] = sizes.head
    about |= _rope(arch, given["rope_parameters"])
    if arch in _PERIODS and (kinds := given["layer_types"]) != _layer_types(arch, sizes.layers):
        about["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    values = {f"{arch}.{key}": value for key, value in about.items() if value is not None}
    values = {"general.architecture": arch, **values}
    again = config_of(values, names, factors=given["rope_parameters"])
    if differing := differences(config, again):
        raise CheckpointError(
            f"a GGUF file of architecture {arch} can't say these settings of config.json: "
            f"{'; '.join(differing)}"
        )
    return values


def config_of(
    values: Mapping[str, Any], names: Collection[str], *, factors: Mapping[str, Any] | None = None
) -> "PreTrainedConfig":
    """The configuration that the metadata describes, and that programs compute by.

    Args:
        names: of the tensors in the file.
        factors: the rope parameters that ROPE_FACTORS was made from, if that is known; else the result lacks
            this scaling.

    Raises:
        CheckpointError: the architecture is unknown.
        Damaged: a value is missing, or has another type.
    """
    from transformers import AutoConfig

    arch = values.get("general.architecture")
    if arch not in MODEL_TYPES:
        raise CheckpointError(
            f"a GGUF file of architecture {arch!r} can't be read; these can: {', '.join(MODEL_TYPES)}"
        )
    about = {key.removeprefix(f"{arch}."): _rounded(value) for key, value in values.items()}
    settings: dict[str, Any] = {}
    try:
        for key, setting in _KEYS[arch].items():
            if key in about:
                settings[setting] = about[key]
            elif key not in ("vocab_size", "final_logit_softcapping", "rope.dimension_count", *_HEAD):
                raise Damaged(f"the metadata has no {arch}.{key}")
        heads = settings["num_attention_heads"]
        head = about.get("attention.key_length", settings["hidden_size"] // heads)
        if about.get("attention.value_length", head) != head:
            raise CheckpointError("keys and values have different lengths, and transformers has one for both")
        if arch == "qwen2" and head * heads != settings["hidden_size"]:
            raise CheckpointError(f"Qwen2's heads have hidden size / heads values, and here {head}")
        if arch != "qwen2":
            settings["head_dim"] = head
        settings.setdefault("vocab_size", len(values.get("tokenizer.ggml.tokens", ())))
        settings["tie_word_embeddings"] = "output.weight" not in names or arch in ("gemma", "gemma2")
        settings["rope_parameters"] = _rope_parameters(arch, about, ROPE_FACTORS in names, factors)
        layers = settings["num_hidden_layers"]
        if arch == "llama":
            settings["attention_bias"] = "blk.0.attn_q.bias" in names
            settings["mlp_bias"] = "blk.0.ffn_gate.bias" in names
        if arch == "qwen3moe":
            settings["norm_topk_prob"] = True
        if arch in _PERIODS:
            by_hidden = layers == _SCALED_BY_HIDDEN[arch]
            settings["query_pre_attn_scalar"] = settings["hidden_size"] // heads if by_hidden else head
            sliding = about.get("attention.sliding_window_pattern")
            settings["layer_types"] = (
                ["sliding_attention" if slides else "full_attention" for slides in sliding]
                if isinstance(sliding, list)
                else _layer_types(arch, layers, sliding)
            )
            settings.setdefault("final_logit_softcapping", None)
        ids = {name: values.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_IDS.items()}
        return AutoConfig.for_model(MODEL_TYPES[arch], **settings, **ids)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Damaged(f"the metadata describes no model: {error}") from None


_SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def differences(config: "PreTrainedConfig", other: "PreTrainedConfig") -> list[str]:
    """What a model computes differently by two configurations, a line for each setting."""
    ours, theirs = config.to_dict(), other.to_dict()
    return [
        f"{name} is {ours.get(name)!r}, and would be {theirs[name]!r}"
        for name in theirs
        if name not in _NO_PART_IN_COMPUTING and not _same(ours.get(name), theirs[name])
    ]


def rope_factors(parameters: Mapping[str, Any], head: int) -> "torch.Tensor":
    """What rotary frequencies are divided by under llama3's scaling: float32 [head / 2]."""
    import torch

    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(parameters["original_max_position_embeddings"])
    exponents = torch.arange(0, head, 2, dtype=torch.float32) / head
    waves = 2 * math.pi * float(parameters["rope_theta"]) ** exponents
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope(arch: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of rotary embeddings."""
    if arch == "gemma3":
        whole, local = parameters["full_attention"], parameters["sliding_attention"]
        if local["rope_type"] != "default":
            raise CheckpointError(
                f"rotary scaling {local['rope_type']} of sliding windows has no counterpart"
            )
        return _rope("", whole) | {"rope.freq_base_swa": local["rope_theta"]}
    about = {"rope.freq_base": parameters["rope_theta"]}
    kind = parameters["rope_type"]
    known = {"default": set[str](), "linear": {"factor"}, "yarn": set(_YARN), "llama3": _LLAMA3}
    given = {key for key, value in parameters.items() if value is not None} - {"rope_type", "rope_theta"}
    if parameters.get("partial_rotary_factor") == 1.0:
        given.remove("partial_rotary_factor")
    if kind not in known or given - known[kind]:
        raise CheckpointError(
            f"rotary scaling {kind} with {listed(given) or 'no parameters'} has no counterpart in GGUF"
        )
    if kind in ("linear", "yarn"):
        scaling = {_YARN[key]: parameters[key] for key in given if key in _YARN}
        about |= {"rope.scaling.type": kind, **scaling}
    return about


def _rope_parameters(
    arch: str, about: Mapping[str, Any], has_factors: bool, factors: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The inverse of `_rope`."""
    theta = about.get("rope.freq_base", 10000.0)
    if arch == "gemma3":
        local = {"rope_type": "default", "rope_theta": about.get("rope.freq_base_swa", 10000.0)}
        return {"full_attention": _rope_parameters("", about, False, None), "sliding_attention": local}
    kind = about.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"rotary scaling {kind} is not read")
    if has_factors:
        return dict(factors) if factors else {"rope_type": "default", "rope_theta": theta}
    scaling = {setting: about[key] for setting, key in _YARN.items() if key in about}
    if kind == "linear":
        scaling = {"factor": scaling["factor"]} if "factor" in scaling else {}
    return {
        "rope_theta": theta,
        "rope_type": "default" if kind == "none" else kind,
        **(scaling if kind != "none" else {}),
    }


def _layer_types(arch: str, layers: int, period: int | None = None) -> list[str]:
    period = _PERIODS[arch] if period is None else period
    return ["sliding_attention" if (n + 1) % period else "full_attention" for n in range(layers)]


def _rounded(value: Any) -> Any:
    """A float32 of the metadata as the number that was meant: 1e-06 rather than 9.999999974752427e-07."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


# The tensors of GGUF files and of the hub, made of each other.


@dataclass(frozen=True)
class Shifted:
    """A tensor plus a number, as float32; a `TensorSource`."""

    source: TensorSource
    by: float

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.source.spec.name, "F32", self.source.spec.shape)

    def fill(self, first: int, into: "torch.Tensor") -> None:
        import torch

        from cairn.checkpoint.tensors.sharded_files import dtype_of

        values = torch.empty(len(into), dtype=dtype_of(self.source))
        self.source.fill(first, values)
        torch.add(values.float(), self.by, out=into)


def hub_tensors(file: GgufFile, config: "PreTrainedConfig") -> dict[str, TensorSource]:
    """The weights of a file by the hub's names; queries, keys and norms as the hub has them.

    Raises:
        Damaged: the experts of a layer are not as many as the metadata says.
        CheckpointError: tensors have no counterpart.
    """
    architecture = architecture_of(config, MODEL_TYPES.values())
    found = {name: source for name, source in file.tensors.items() if name != ROPE_FACTORS}
    tensors: dict[str, TensorSource] = {}
    strange: list[str] = []
    for name, part in GGUF_NAMES.parts(found, file.path).items():
        source = found[name]
        if part.role.startswith("expert."):
            shape = source.spec.shape[1:]
            if len(source.spec.shape) != 3 or source.spec.shape[0] != config.num_experts:  # pyright: ignore
                raise Damaged(f"{file.path}: {name} {list(source.spec.shape)} holds other experts")
            parts = {
                ModelTensor(part.role, part.kind, part.layer, n): TensorSection(
                    source, n * math.prod(shape), TensorSpec(name, source.spec.dtype, shape)
                )
                for n in range(source.spec.shape[0])
            }
        else:
            parts = {part: converted(part, source, config, to_hub=True)}
        for each, tensor in parts.items():
            hub_name = architecture.name(each)
            if hub_name is None:
                strange.append(name)
            else:
                tensors[hub_name] = tensor
    if strange:
        raise CheckpointError(f"{file.path}: {config.model_type} has no such tensors: {listed(set(strange))}")
    return tensors


def converted(
    part: ModelTensor, source: TensorSource, config: "PreTrainedConfig", *, to_hub: bool
) -> TensorSource:
    """A tensor's values as GGUF has them, or with `to_hub` as the hub has them.

    Raises:
        CheckpointError: the rows of queries or keys are not as many as heads.
    """
    rotary = {"attention.query": config.num_attention_heads, "attention.key": config.num_key_value_heads}
    if config.model_type == "llama" and part.role in rotary:
        heads: int = rotary[part.role]
        if not source.spec.shape or source.spec.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{source.spec.name} {list(source.spec.shape)} can't be that of {heads} heads"
            )
        return RotaryRows(source, heads, to_hub)
    if ARCHITECTURES[config.model_type].zero_centered_norms and part.role in NORMS:
        return Shifted(source, -1.0 if to_hub else 1.0)
    return source


def gguf_tensors(
    weights: Mapping[str, TensorSource], config: "PreTrainedConfig", where: Path
) -> dict[str, TensorSource]:
    """The inverse of `hub_tensors`.

    Raises:
        CheckpointError: weights have no counterpart, or an expert is missing.
    """
    architecture = architecture_of(config, MODEL_TYPES.values())
    tensors: dict[str, TensorSource] = {}
    experts: dict[str, dict[int, TensorSource]] = {}
    for name, part in architecture.parts(weights, where).items():
        gguf_name = GGUF_NAMES.name(part)
        assert gguf_name is not None, part  # it has a name for every role
        if part.expert is not None:
            experts.setdefault(gguf_name, {})[part.expert] = weights[name]
            tensors[gguf_name] = weights[name]  # keeps its place in the order
        else:
            tensors[gguf_name] = converted(part, weights[name], config, to_hub=False)
    for name, by_number in experts.items():
        if sorted(by_number) != list(range(config.num_experts)):  # pyright: ignore # Qwen3MoeConfig has it
            raise CheckpointError(f"{where}: experts are missing of {name}")
        inner = by_number[0].spec.shape
        ordered = [by_number[number] for number in sorted(by_number)]
        tensors[name] = Joined.of(name, ordered, (len(ordered), *inner))
    return tensors
