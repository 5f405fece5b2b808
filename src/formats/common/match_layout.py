"""Fits a checkpoint's tensors to a model, whatever names they have, and whether or not they are in parts.

Each function takes and gives sources, which are read later: a tensor that is several in the other form
becomes sections of one source, and several become one that reads them in turn.
"""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.placement import Place
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.checkpoint.tensors.stream_writer import pieces_of, value_of
from cairn.formats.base import Content
from cairn.formats.common.tensor_views import Joined, TensorSection
from cairn.model.hub_layout import Layout, hub_layout


def weights_of(found: Mapping[str, TensorSource], layout: Layout, where: Path) -> dict[str, TensorSource]:
    """A model's weights by the hub's names, from those with any names that transformers knows.

    Raises:
        CheckpointError: some are missing, have another shape, or have no place in the model.
    """
    places = _places(found, layout, where)
    exact = {places[name]: source for name, source in found.items() if name in places}
    whole = {place.name: source for place, source in exact.items() if _is_whole(place, layout)}
    weights: dict[str, TensorSource] = {}
    missing: list[str] = []
    for name, place in layout.places.items():
        if place in exact:
            weights[name] = exact[place]
        elif place.name in whole:
            source = whole[place.name]
            weights[name] = TensorSection(
                source, place.first, TensorSpec(name, source.spec.dtype, place.shape)
            )
        else:
            missing.append(name)
    refuse(missing, where, "these weights of the model are missing")
    return weights


def in_memory(found: Mapping[str, TensorSource], layout: Layout, where: Path) -> dict[str, TensorSource]:
    """A model's tensors by transformers' names, in the model's order, from those with any known names.

    Buffers that are not in `found` are left out.

    Raises:
        CheckpointError: some are missing, have another shape or no place in the model, or the parts of one
            have different data types.
    """
    return _wholes(found, _places(found, layout, where), layout, where, "these weights are missing")


def state_of(found: Mapping[str, TensorSource], layout: Layout, where: Path) -> dict[str, TensorSource]:
    """The optimiser's state by transformers' names, from that with any names that transformers knows.

    The parts of a tensor that transformers trains in one piece must be at the same step.

    Raises:
        CheckpointError: some of it is missing, has another shape, or has no place in the model.
    """
    state: dict[str, TensorSource] = {}
    for kind, by_weight in _kinds(found).items():
        if kind == "step":
            known = layout.find(by_weight.keys())
            places = {name: place for name, place in known.items() if name in by_weight}
            named = _steps(by_weight, places, layout, where)
        else:
            what = f"the optimiser's {kind} is missing for these weights"
            named = _wholes(by_weight, _places(by_weight, layout, where), layout, where, what)
        state |= {f"{name}.{kind}": source for name, source in named.items()}
    return state


def refuse(names: Sequence[str], where: Path, what: str) -> None:
    """Raise an error that lists `names`, if there are any.

    Raises:
        CheckpointError: there are some.
    """
    if names:
        raise CheckpointError(f"{where}: {what}: {listed(names)}")


def _kinds(state: Mapping[str, TensorSource]) -> dict[str, dict[str, TensorSource]]:
    """The optimiser's state by its kind, such as exp_avg, and the weight's name."""
    kinds: dict[str, dict[str, TensorSource]] = {}
    for name, source in state.items():
        weight, _, kind = name.rpartition(".")
        kinds.setdefault(kind, {})[weight] = source
    return kinds


def _wholes(
    found: Mapping[str, TensorSource], places: Mapping[str, Place], layout: Layout, where: Path, missing: str
) -> dict[str, TensorSource]:
    """The tensors in memory that are there, or whose parts are; `missing` is said of those that lack some."""
    held: dict[str, dict[Place, TensorSource]] = {}
    for name, place in places.items():
        held.setdefault(place.name, {})[place] = found[name]
    parts: dict[str, dict[str, Place]] = {}
    for name, place in layout.places.items():
        parts.setdefault(place.name, {})[name] = place
    wholes: dict[str, TensorSource] = {}
    lacking: list[str] = []
    mixed: list[str] = []
    for owner, shape in layout.shapes.items():
        there = held.get(owner, {})
        whole = there.get(Place(owner, 0, shape))
        lacks = [name for name, place in parts[owner].items() if place not in there]
        if whole is not None:
            wholes[owner] = whole
        elif lacks and there:
            lacking += lacks
        elif lacks:
            lacking += [] if owner in layout.buffers else [owner]
        else:
            sources = tuple(there[place] for place in parts[owner].values())
            types = {source.spec.dtype for source in sources}
            mixed += [owner] if len(types) > 1 else []
            wholes[owner] = Joined.of(owner, sources, shape)
    refuse(lacking, where, missing)
    refuse(mixed, where, "the parts of these tensors have different data types")
    return wholes


def _steps(
    found: Mapping[str, TensorSource], places: Mapping[str, Place], layout: Layout, where: Path
) -> dict[str, TensorSource]:
    """The step of each tensor in memory."""
    steps: dict[str, TensorSource] = {}
    apart: list[str] = []
    for name, place in places.items():
        if place.name not in steps:
            steps[place.name] = found[name]
        elif value_of(steps[place.name]) != value_of(found[name]):
            apart.append(name)
    refuse(apart, where, "the optimiser is at different steps for parts of what transformers trains as one")
    trained = layout.shapes.keys() - layout.buffers
    refuse(sorted(trained - steps.keys()), where, "the optimiser's step is missing for these weights")
    return steps


def _places(found: Mapping[str, TensorSource], layout: Layout, where: Path) -> dict[str, Place]:
    """The place of each tensor; copies of tied ones have none.

    Raises:
        CheckpointError: a tensor has another shape than its place, or no place.
    """
    places = {name: place for name, place in layout.find(found.keys()).items() if name in found}
    tied = layout.tied.keys() | layout.tied_in_memory.keys()
    unknown = sorted(found.keys() - places.keys() - tied)
    refuse(unknown, where, "these tensors have no place in the model that config.json describes")
    other = [
        f"{name} {list(found[name].spec.shape)} instead of {list(place.shape)}"
        for name, place in places.items()
        if found[name].spec.shape != place.shape
    ]
    refuse(other, where, "these tensors have another shape than config.json says")
    return places


def _is_whole(place: Place, layout: Layout) -> bool:
    return place.shape == layout.shapes[place.name]


# Tensors on their way into a file of another format, by the names that the model has in memory.


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A tensor that is read when it is written; the same object in several places is written once."""

    source: TensorSource

    @property
    def dtype(self) -> torch.dtype:
        """The data type, in which it is written."""
        return dtype_of(self.source)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.spec.shape

    @property
    def blank(self) -> torch.Tensor:
        """A tensor of this shape and data type without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """The tensor.

        Raises:
            Damaged: the source is invalid.
        """
        # In pieces: the storage of a tensor that NumPy has seen, to checksum it, can't be resized any more.
        whole = torch.empty(self.shape, dtype=self.dtype)
        flat, first = whole.view(-1), 0
        for piece in pieces_of(self.source):
            flat[first : first + len(piece)] = piece
            first += len(piece)
        return whole


def state_dict_of(content: Content) -> dict[str, Outgoing]:
    """A step's weights as `model.state_dict()` has them; those that are tied are the same object.

    Raises:
        CheckpointError: there is no config.json, or the weights do not fit it.
    """
    weights, tied = outgoing_weights(content)
    return weights | {name: weights[of] for name, of in tied.items()}


def outgoing_weights(content: Content) -> tuple[dict[str, Outgoing], dict[str, str]]:
    """A step's weights by transformers' names, and the names that are tied to others, with these.

    Raises:
        CheckpointError: there is no config.json, or the weights do not fit it.
    """
    if content.model is None:
        raise CheckpointError("there is no config.json, which tells the names of the tensors in memory")
    config: PreTrainedConfig = AutoConfig.from_pretrained(content.model)
    layout = hub_layout(config)
    weights = in_memory(content.tensors[MODEL], layout, content.model)
    return {name: Outgoing(source) for name, source in weights.items()}, layout.tied_in_memory
