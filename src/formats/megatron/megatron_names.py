"""The names and layout of the tensors of megatron-core's GPT model.

The layers of a model are one tensor, stacked in the first dimension, and so are their experts in the second.
Queries, keys and values are one tensor, in which each group of heads that share a key has its queries, its
key and its value one after the other. Gate and up are one tensor, one after the other. With
`singleton_local_shards`, or layers of different kinds, layers, experts, gates and ups are tensors of their
own, with numbers in their names.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cairn.model.architectures import Role, Sizes

ABOUT = "metadata.json"
"""The file in which megatron-core names the format of a checkpoint."""
LATEST = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM names the newest checkpoint in a folder: a number, or RELEASE."""
FORMAT = "torch_dist"
RELEASE = "release"
"""The folder of weights from which Megatron-LM starts at iteration 0, and the name that stands for it."""
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The architectures that the model has, of those in `architectures.ARCHITECTURES`."""
OUTSIDE: Mapping[str, tuple[Role, ...]] = {
    "embedding.word_embeddings": ("embedding",),
    "decoder.final_layernorm": ("final_norm",),
    "output_layer": ("head",),
}
"""Modules outside of layers, and what each holds."""
IN_LAYERS: Mapping[str, tuple[Role, ...]] = {
    "self_attention.linear_qkv.layer_norm": ("attention_norm",),
    "self_attention.linear_qkv": ("attention.query", "attention.key", "attention.value"),
    "self_attention.q_layernorm": ("attention.query_norm",),
    "self_attention.k_layernorm": ("attention.key_norm",),
    "self_attention.linear_proj": ("attention.output",),
    "mlp.linear_fc1.layer_norm": ("mlp_norm",),
    "mlp.linear_fc1": ("mlp.gate", "mlp.up"),
    "mlp.linear_fc2": ("mlp.down",),
    "mlp.router": ("router",),
    "mlp.experts.experts.linear_fc1": ("expert.gate", "expert.up"),
    "mlp.experts.experts.linear_fc2": ("expert.down",),
}
"""Modules in layers, and what each holds, one after the other."""
ALIASES = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
}
"""Other names that norms have where they are no part of the linear layer after them."""
OWN_NORM = {"mlp.linear_fc1.layer_norm": ("pre_mlp_layernorm",)}
"""The other name that this norm has before experts, in the models that Transformer Engine makes."""
PADDED = frozenset({"embedding", "head"})
"""What may have more rows than the vocabulary has tokens."""
_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True)
class Key:
    """A key of a checkpoint.

    roles: of the parts of the tensor, in their order. kind: weight or bias. layer, expert: None if the tensor
    is not of one layer or expert. stacked: which of them the tensor's first dimensions count.
    """

    roles: tuple[Role, ...]
    kind: str
    layer: int | None = None
    expert: int | None = None
    stacked: tuple[str, ...] = ()


def parse(key: str) -> Key | None:
    """What a key means; None if the model has no such tensor."""
    layered = key.startswith(_LAYERS)
    rest, layer = _number(key.removeprefix(_LAYERS)) if layered else (key, None)
    expert = None
    if rest.startswith(_EXPERTS):
        rest, expert = _number(rest.removeprefix(_EXPERTS))
        rest = _EXPERTS + rest
    match = re.fullmatch(r"(.+)[._](weight|bias)(?:_([wv]))?", rest)
    if match is None:
        return None
    module, kind, half = match.groups()
    roles = (IN_LAYERS if layered else OUTSIDE).get(ALIASES.get(module, module))
    if roles is None or (half and len(roles) != 2):
        return None
    if half:
        roles = roles[:1] if half == "w" else roles[1:]
    of_experts = roles[0].startswith("expert.")
    stacked = ("layer",) * (layered and layer is None) + ("expert",) * (of_experts and expert is None)
    return Key(roles, kind, layer, expert, stacked)


def key_of(module: str, kind: str) -> str:
    """The key of a module's tensor for all layers."""
    separator = "_" if module.endswith(".layer_norm") else "."
    return f"{'' if module in OUTSIDE else _LAYERS}{module}{separator}{kind}"


def _number(text: str) -> tuple[str, int | None]:
    """What follows a number and a dot, and the number, if there is one."""
    number, _, rest = text.partition(".")
    return (rest, int(number)) if re.fullmatch(r"0|[1-9][0-9]{0,5}", number) else (text, None)


@dataclass(frozen=True)
class RoleRows:
    """Consecutive rows of one part: `count` from row `first` of the tensor of several roles."""

    role: Role
    first: int
    count: int


def rows_of(roles: tuple[Role, ...], rows: int, sizes: Sizes) -> Iterator[RoleRows]:
    """The rows of a tensor of one layer that holds several roles, in their order.

    Args:
        rows: of the tensor.

    Raises:
        ValueError: they do not fit the model's sizes.
    """
    if len(roles) == 1:
        yield RoleRows(roles[0], 0, rows)
    elif len(roles) == 2:
        if rows % 2:
            raise ValueError(f"has {rows} rows for {' and '.join(roles)}, which should be as many")
        yield from (RoleRows(role, number * rows // 2, rows // 2) for number, role in enumerate(roles))
    else:
        each = (sizes.heads // sizes.kv_heads * sizes.head, sizes.head, sizes.head)
        if rows != sum(each) * sizes.kv_heads:
            raise ValueError(
                f"has {rows} rows, and not those of {sizes.heads} queries, {sizes.kv_heads} keys and as many "
                f"values of {sizes.head} each"
            )
        first = 0
        for _ in range(sizes.kv_heads):
            for role, count in zip(roles, each, strict=True):
                yield RoleRows(role, first, count)
                first += count


def row_values(shape: tuple[int, ...]) -> int:
    """Values in a row."""
    return math.prod(shape[1:])
