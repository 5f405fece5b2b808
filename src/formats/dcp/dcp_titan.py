"""torchtitan's tensors in those that transformers has in memory; each divides a layer's experts in its way.

transformers has one tensor with `gate_proj` and `up_proj` of each expert in turn, and one with `down_proj`;
torchtitan has one of all experts for each of the three.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.placement import Place
from cairn.checkpoint.tensors.source import listed
from cairn.formats.common.outgoing import Outgoing
from cairn.formats.common.tensor_views import Joined, ValueRange
from cairn.formats.dcp.dcp_programs import TITAN, TITAN_TYPES, expert_bias
from cairn.model.architectures import EXPERTS, Architecture, architecture_of, sizes_of
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
        return Outgoing(Joined(runs, spec), tensor.dtype)


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
