"""The modules of a decoder by role, and their names on the hub: what formats with other names map from.

A format has a table of its own names (`Names`) and translates with `part` and `name`:

    part = architecture.part("model.layers.3.self_attn.q_proj.weight")
    GGUF.name(part)  # "blk.3.attn_q.weight"
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.source import listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Role = Literal[
    "embedding",
    "head",
    "final_norm",
    "attention_norm",
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "attention.query_norm",
    "attention.key_norm",
    "attention.after_norm",
    "mlp_norm",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "mlp.after_norm",
    "router",
    "expert.gate",
    "expert.up",
    "expert.down",
]
"""What a module does. A norm is applied to the input of attention, mlp or experts; `after_norm` to their
output, before it is added. gate, up, down: down(act(gate(x)) * up(x))."""
ROLES: tuple[Role, ...] = get_args(Role)
EXPERTS: frozenset[Role] = frozenset({"expert.gate", "expert.up", "expert.down"})
NORMS: frozenset[Role] = frozenset(role for role in ROLES if role.endswith("norm"))


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of a model. kind: weight or bias. layer, expert: None where there are none."""

    role: Role
    kind: str = "weight"
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Names:
    """The names of tensors in one format.

    templates: of modules, by role, such as `model.layers.{layer}.mlp.experts.{expert}.up_proj`; the tensor's
    name has `.weight` or `.bias` after it. bare: the roles of which there are weights alone, with nothing
    after the name.
    """

    templates: Mapping[Role, str]
    bare: frozenset[Role] = field(default=frozenset(), kw_only=True)

    def name(self, part: ModelTensor) -> str | None:
        """The name of a part; None if the format has no such role."""
        template = self.templates.get(part.role)
        if template is None or (part.role in self.bare and part.kind != "weight"):
            return None
        name = template.format(layer=part.layer, expert=part.expert)
        return name if part.role in self.bare else f"{name}.{part.kind}"

    def part(self, name: str) -> ModelTensor | None:
        """The part with a name; None if it is not in the table."""
        for role, pattern in self._patterns.items():
            if match := pattern.fullmatch(name):
                found = match.groupdict()
                kind = found.pop("kind", "weight")
                return ModelTensor(role, kind, **{key: int(value) for key, value in found.items()})
        return None

    def parts(self, names: Iterable[str], where: object) -> dict[str, ModelTensor]:
        """The parts with these names.

        Args:
            where: names the source in the error.

        Raises:
            CheckpointError: some are not in the table; the message lists them.
        """
        found = {name: self.part(name) for name in names}
        if strange := [name for name, part in found.items() if part is None]:
            raise CheckpointError(f"{where}: these tensors have no known role: {listed(strange)}")
        return {name: part for name, part in found.items() if part is not None}

    @cached_property
    def _patterns(self) -> dict[Role, re.Pattern[str]]:
        def pattern(role: Role, template: str) -> re.Pattern[str]:
            escaped = re.sub(r"\\{(layer|expert)\\}", r"(?P<\1>0|[1-9][0-9]{0,5})", re.escape(template))
            return re.compile(escaped if role in self.bare else rf"{escaped}\.(?P<kind>weight|bias)")

        return {role: pattern(role, template) for role, template in self.templates.items()}


@dataclass(frozen=True)
class Architecture(Names):
    """The hub's names of one model type.

    zero_centered_norms: norms multiply by 1 + weight, as Gemma's do.
    """

    model_type: str = ""
    zero_centered_norms: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: numbers of layers, heads and tokens, and lengths of a head and of a token's state.

    tied: whether the head's weight is the embedding's.
    """

    layers: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int
    tied: bool
    experts: int = 0


_LAYER = "model.layers.{layer}"
_LLAMA: dict[Role, str] = {
    "embedding": "model.embed_tokens",
    "attention_norm": f"{_LAYER}.input_layernorm",
    "attention.query": f"{_LAYER}.self_attn.q_proj",
    "attention.key": f"{_LAYER}.self_attn.k_proj",
    "attention.value": f"{_LAYER}.self_attn.v_proj",
    "attention.output": f"{_LAYER}.self_attn.o_proj",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "mlp.gate": f"{_LAYER}.mlp.gate_proj",
    "mlp.up": f"{_LAYER}.mlp.up_proj",
    "mlp.down": f"{_LAYER}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_HEAD_NORMS: dict[Role, str] = {
    "attention.query_norm": f"{_LAYER}.self_attn.q_norm",
    "attention.key_norm": f"{_LAYER}.self_attn.k_norm",
}
_EXPERTS: dict[Role, str] = {
    "router": f"{_LAYER}.mlp.gate",
    "expert.gate": f"{_LAYER}.mlp.experts.{{expert}}.gate_proj",
    "expert.up": f"{_LAYER}.mlp.experts.{{expert}}.up_proj",
    "expert.down": f"{_LAYER}.mlp.experts.{{expert}}.down_proj",
}
_FOUR_NORMS: dict[Role, str] = {
    "attention.after_norm": f"{_LAYER}.post_attention_layernorm",
    "mlp_norm": f"{_LAYER}.pre_feedforward_layernorm",
    "mlp.after_norm": f"{_LAYER}.post_feedforward_layernorm",
}
ARCHITECTURES: dict[str, Architecture] = {
    known.model_type: known
    for known in (
        Architecture(_LLAMA, "llama"),
        Architecture(_LLAMA, "mistral"),
        Architecture(_LLAMA, "qwen2"),
        Architecture(_LLAMA | _HEAD_NORMS, "qwen3"),
        Architecture(_LLAMA | _HEAD_NORMS | _EXPERTS, "qwen3_moe"),
        Architecture(_LLAMA, "gemma", zero_centered_norms=True),
        Architecture(_LLAMA | _FOUR_NORMS, "gemma2", zero_centered_norms=True),
        Architecture(_LLAMA | _HEAD_NORMS | _FOUR_NORMS, "gemma3_text", zero_centered_norms=True),
    )
}
"""By transformers' `model_type`."""


def architecture_of(config: "PreTrainedConfig", known: Iterable[str] = ARCHITECTURES) -> Architecture:
    """The architecture of the model that `config` describes.

    Args:
        known: the model types that the format has names for.

    Raises:
        CheckpointError: it is none of them; the message lists them.
    """
    if config.model_type not in known:
        raise CheckpointError(
            f"a model of type {config.model_type!r} has no counterpart in this format; these have: "
            f"{', '.join(known)}"
        )
    return ARCHITECTURES[config.model_type]


def sizes_of(config: "PreTrainedConfig") -> Sizes:
    """The sizes of the model that `config` describes, which is one of ARCHITECTURES."""
    about: Any = config  # each model type has its own class
    heads: int = about.num_attention_heads
    return Sizes(
        layers=about.num_hidden_layers,
        heads=heads,
        kv_heads=about.num_key_value_heads,
        head=getattr(about, "head_dim", None) or about.hidden_size // heads,
        hidden=about.hidden_size,
        vocabulary=about.vocab_size,
        tied=bool(about.tie_word_embeddings),
        experts=getattr(about, "num_experts", 0),
    )
