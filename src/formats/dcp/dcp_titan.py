"""torchtitan's tensors in those that transformers has in memory; each divides a layer's experts in its way.

transformers has one tensor with `gate_proj` and `up_proj` of each expert in turn, and one with `down_proj`;
torchtitan has one of all experts for each of the three.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.placement import Place
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.common.adamw import STATE
from cairn.formats.common.match_layout import Outgoing
from cairn.formats.common.tensor_views import Joined, RotaryRows, ValueRange
from cairn.formats.dcp.dcp_programs import TITAN, TITAN_TYPES, expert_bias
from cairn.formats.dcp.dcp_tensors import DcpTensor
from cairn.model.architectures import EXPERTS, Architecture, Role, architecture_of, sizes_of
from cairn.model.hub_layout import hub_layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class TitanPart:
    """A tensor of torchtitan's that is in one of transformers'.

    name: torchtitan's. places: of each expert's matrix, in order; empty where the tensors are the same.
    """

    name: str
    places: tuple[Place, ...] = ()

    def of(self, tensor: Outgoing) -> Outgoing:
        """The tensor of torchtitan's in this one of transformers'."""
        if not self.places:
            return tensor
        shape = self.places[0].shape
        runs = tuple(ValueRange(tensor.source, place.first, math.prod(shape)) for place in self.places)
        spec = TensorSpec(self.name, tensor.source.spec.dtype, (len(runs), *shape))
        return Outgoing(Joined(runs, spec))


def titan_parts(names: Collection[str], config: "PreTrainedConfig") -> dict[str, list[TitanPart]]:
    """What torchtitan has of each weight, by transformers' name.

    Raises:
        CheckpointError: torchtitan has no such model, or no counterpart of some weights, which are listed.
    """
    architecture = architecture_of(config, TITAN_TYPES)
    held: dict[str, dict[str, Place]] = {}
    for hub, place in hub_layout(config).places.items():
        held.setdefault(place.name, {})[hub] = place
    parts: dict[str, list[TitanPart]] = {}
    strange: list[str] = []
    for name in names:
        found = _parts(held.get(name, {}), name, architecture)
        parts[name] = found
        strange += [] if found else [name]
    if strange:
        raise CheckpointError(f"torchtitan has no counterpart of these weights: {listed(strange)}")
    return parts


def _parts(places: Mapping[str, Place], name: str, architecture: Architecture) -> list[TitanPart]:
    """What torchtitan has of a weight; empty if it lacks some of it.

    Args:
        places: of the hub's tensors in it; none where it is tied to another.
    """
    experts: dict[str, dict[int, Place]] = {}
    for hub in places or (name,):
        part = architecture.part(hub)
        titan = None
        if part is not None and part.kind == "weight":
            titan = TITAN.name(replace(part, expert=None))
        if part is None or titan is None:
            return []
        if part.expert is None or part.role not in EXPERTS:
            return [TitanPart(titan)]
        experts.setdefault(titan, {})[part.expert] = places[hub]
    return [TitanPart(titan, tuple(found[n] for n in sorted(found))) for titan, found in experts.items()]


def expert_biases(config: "PreTrainedConfig", keys: Iterable[str]) -> dict[str, int]:
    """The keys of torchtitan's biases of experts, of which transformers has none, with their lengths.

    Args:
        keys: torchtitan's of the weights; layers with a router have such a bias.
    """
    parts = (TITAN.part(key) for key in keys)
    layers = [part.layer for part in parts if part is not None and part.role == "router"]
    return {expert_bias(layer): sizes_of(config).experts for layer in layers if layer is not None}


# torchtitan's optimiser state of queries, keys and values that are one weight (`fuse_qkv`).


_FUSED = re.compile(r"(layers\.(?:0|[1-9][0-9]{0,5})\.attention\.)qkv_linear\.wqkv\.weight")
_PARTS = ("wq", "wk", "wv")


def fused_parts(name: str) -> tuple[str, ...]:
    """torchtitan's names of the weights of which `name` is one; none if it is no such weight."""
    found = _FUSED.fullmatch(name)
    return tuple(f"{found[1]}qkv_linear.{part}.weight" for part in _PARTS) if found else ()


def head_norm(name: str) -> str:
    """The weight beside a fused one that is as long as a head, in models that have it."""
    found = _FUSED.fullmatch(name)
    return f"{found[1]}q_norm.weight" if found else ""


def cut(
    source: TensorSource, names: tuple[str, ...], weights: Mapping[str, DcpTensor], head: int
) -> dict[str, TensorSource] | None:
    """A moment of the weights `names`, from that of the one weight; None if the shapes are others.

    Args:
        weights: those in the checkpoint, by torchtitan's names.
        head: number of rows of a head.
    """
    if not all(name in weights and len(weights[name].shape) == 2 for name in names):
        return None
    (queries, width), (keys, _), (values, _) = (weights[name].shape for name in names)
    whole = (queries + keys + values, width)
    if source.spec.shape != whole or keys != values or keys % head or queries % keys:
        return None
    per_key = queries // keys
    rows = per_key + 2
    places = ((0, per_key), (per_key, 1), (per_key + 1, 1))
    each = head * width
    parts: dict[str, TensorSource] = {}
    for name, (first, count) in zip(names, places, strict=True):
        runs = tuple(
            ValueRange(source, (group * rows + first) * each, count * each) for group in range(keys // head)
        )
        spec = TensorSpec(name, source.spec.dtype, weights[name].shape)
        assert sum(run.count for run in runs) == math.prod(spec.shape)
        parts[name] = Joined(runs, spec)
    return parts


# The order of rows of queries and keys in torchtitan's checkpoints; a Llama's is not the hub's.


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
        part = architecture.part(weight if kind in STATE else name)
        if part is not None and part.role in heads and kind != "step":
            ordered[name] = RotaryRows(source, heads[part.role], to_hub)
        else:
            ordered[name] = source
    return ordered
