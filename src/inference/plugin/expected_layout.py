"""The tensors that a model's folder or trainer has to hold, in the hub's layout and in transformers' own.

Transformers holds some tensors differently from the hub's files, such as all experts of a layer as one.
vLLM is always given the hub's layout.
"""

import collections
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from cairn.checkpoint.tensors.placement import Place
from cairn.model.hub_layout import hub_layout


@dataclass(frozen=True)
class ExpectedLayout:
    """The shape of every tensor, and the tensor that each tied one is tied to."""

    shapes: dict[str, list[int]]
    tied: dict[str, str]


class ExpectedTensors:
    """What has to be there for the model of `config`; nothing of it is in memory.

    Raises:
        LayoutUnknown: transformers does not tell how the hub's tensors are made of its own.
    """

    def __init__(self, config: PreTrainedConfig):
        self.layout = hub_layout(config)
        """Where the tensors of files are in transformers' model."""
        self._parts: dict[str, list[tuple[str, Place]]] = collections.defaultdict(list)
        for name, place in self.layout.places.items():
            self._parts[place.name].append((name, place))

    @functools.cached_property
    def own(self) -> ExpectedLayout:
        """As transformers' model holds them, and a trainer that sends them from its memory."""
        return _with_tied(self.layout.shapes, self.layout.tied_in_memory)

    @functools.cached_property
    def hub(self) -> ExpectedLayout:
        """As in the files of the hub."""
        shapes = {name: place.shape for name, place in self.layout.places.items()}
        return _with_tied(shapes, self.layout.tied)

    def layout_of(self, names: Iterable[str]) -> ExpectedLayout:
        """The layout that tensors of these `names` are in, or are most like."""
        found = set(names)
        return min(self.hub, self.own, key=lambda layout: len(layout.shapes.keys() ^ found))

    def to_hub(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same values as tensors of the hub's layout, from those of transformers'; they share memory."""
        return {
            name: tensor.reshape(-1)[place.first :][: torch.Size(place.shape).numel()].view(place.shape)
            for own, tensor in weights.items()
            for name, place in self._parts[own]
        }


def _with_tied(shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> ExpectedLayout:
    """A layout that also has the tied tensors, of which some folders hold copies."""
    all_shapes = {**shapes, **{name: shapes[of] for name, of in tied.items()}}
    return ExpectedLayout({name: list(shape) for name, shape in all_shapes.items()}, dict(tied))
