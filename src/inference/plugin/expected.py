"""The tensors of a model, in the hub's layout and in transformers' own.

Transformers holds some tensors differently from the hub's files, such as all experts of a layer as one.
vLLM is always given the hub's layout.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True)
class Layout:
    """The shape of every tensor, and the tensor that each tied one is tied to."""

    shapes: dict[str, list[int]]
    tied: dict[str, str]


class ExpectedTensors:
    """What a folder or a trainer has to hold for the model of `config`; nothing of it is in memory."""

    def __init__(self, config: PreTrainedConfig):
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config)
        self._tensors = self._model.state_dict()

    @functools.cached_property
    def own(self) -> Layout:
        """As transformers' model holds them, and a trainer that sends them from its memory."""
        return Layout(_shapes(self._tensors), dict(self._model.all_tied_weights_keys))

    @functools.cached_property
    def hub(self) -> Layout:
        """As in the files of the hub."""
        tied = {self._hub_name(name): self._hub_name(of) for name, of in self.own.tied.items()}
        return Layout(_shapes(self.to_hub(self._tensors)), tied)

    def layout_of(self, names: Iterable[str]) -> Layout:
        """The layout that tensors of these `names` are in, or are most like."""
        found = set(names)
        return min(self.hub, self.own, key=lambda layout: len(layout.shapes.keys() ^ found))

    def to_hub(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert tensors from transformers' layout; all those of a layer must be given together."""
        return revert_weight_conversion(self._model, dict(weights))

    def _hub_name(self, name: str) -> str:
        return next(iter(self.to_hub({name: self._tensors[name]})))


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
