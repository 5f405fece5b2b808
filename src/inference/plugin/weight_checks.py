"""Whether a model's parameters hold the tensors that came, by the checksums of both.

vLLM's loaders stack tensors, pad them with zeros and reorder them by rows, all of which leaves the sum of
their words as it is; some loaders compute. Which layers are of the first kind shows in the weights with which
the server starts, however small the difference of later ones is. Of the others only the probe tells.

Reading a whole model back takes about as long as a tenth of an update, so each update has its share of layers
looked at; the first ones have all, since loaders that leave a layer out do so every time.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch

from cairn.policy.checksums import checksum, wrapped
from cairn.policy.errors import NotHeld

FIRST_UPDATES = 2
"""All layers are looked at in these; a run's first policy may be what the server started with."""
SHARES = 8
"""Then every layer is looked at in one of so many."""


class HeldWeights:
    """What a model's tensors and parameters were at the server's start, by their names."""

    def __init__(self) -> None:
        self._updates = 0
        self._came: dict[str, int] = {}
        self._held: dict[str, int] = {}

    def watch(
        self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Note the tensors that go into the model at its start, which computes in `dtype`."""
        for name, tensor in tensors:
            if tensor.is_floating_point():
                self._came[name] = checksum(tensor.to(dtype))
            yield name, tensor

    def note(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Note what has become of them."""
        self._held = {name: checksum(parameter) for name, parameter in parameters}

    def begin_update(self) -> None:
        """The model is about to get other weights."""
        self._updates += 1

    def is_due(self, layer: int) -> bool:
        """Whether this update has to check a layer, by its place among the layers."""
        return self._updates <= FIRST_UPDATES or (layer + self._updates) % SHARES == 0

    def check(self, came: Mapping[str, int], parameters: Mapping[str, torch.nn.Parameter]) -> bool:
        """Compare tensors that came, by their checksums, with the parameters that they were loaded into.

        Returns whether that could be done.

        Raises:
            NotHeld: they differ, in a layer in which they were the same at the start.
        """
        if not (came.keys() <= self._came.keys() and parameters.keys() <= self._held.keys()):
            return False
        if _total(self._came, came) != _total(self._held, parameters):
            return False
        if wrapped(came.values()) != wrapped(map(checksum, parameters.values())):
            raise NotHeld(f"checksums of {', '.join(sorted(parameters))} after loading")
        return True


def held_by(model: torch.nn.Module) -> HeldWeights:
    """What is known of a model; nothing if it was not loaded by Cairn's loader."""
    return _KNOWN.setdefault(model, HeldWeights())


_KNOWN: "weakref.WeakKeyDictionary[torch.nn.Module, HeldWeights]" = weakref.WeakKeyDictionary()


def _total(sums: Mapping[str, int], names: Iterable[str]) -> int:
    return wrapped(sums[name] for name in names)
