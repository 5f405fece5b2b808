"""The order of rows of queries and keys in torchtitan's checkpoints; a Llama's is not the hub's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.common.adamw import MOMENTS
from cairn.formats.common.tensor_views import RotaryRows
from cairn.formats.dcp.dcp_programs import TITAN_TYPES
from cairn.model.architectures import Role, architecture_of, sizes_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REORDERED = ("llama",)
"""The model types whose queries and keys torchtitan has in the order of Meta's Llama."""


def in_rotary_order(
    tensors: Mapping[str, TensorSource], config: "PreTrainedConfig", *, to_hub: bool
) -> dict[str, TensorSource]:
    """Weights or AdamW's state, by the hub's names of weights, with rows in the hub's order or torchtitan's.

    Raises:
        CheckpointError: torchtitan has no such model, or Cairn does not know its names.
    """
    architecture = architecture_of(config, TITAN_TYPES)
    if architecture.model_type not in REORDERED:
        return dict(tensors)
    sizes = sizes_of(config)
    heads: dict[Role, int] = {"attention.query": sizes.heads, "attention.key": sizes.kv_heads}
    ordered: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        weight, _, kind = name.rpartition(".")
        part = architecture.part(weight if kind in MOMENTS else name)
        if part is not None and part.role in heads and kind != "step":
            ordered[name] = RotaryRows(source, heads[part.role], to_hub)
        else:
            ordered[name] = source
    return ordered
