"""How micro-batches go through the stages of a model: what of it is on a rank, and on those before and after."""

# megatron-core is an optional dependency, without types.
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from cairn.trainer.backends.megatron.without_gpu import without_gpu
from cairn.trainer.packing import MicroBatch

Out = TypeVar("Out")
S = TypeVar("S")


class Stages(Protocol):
    """Runs passes through all stages of a model; all ranks that share samples call each method together.

    first, last: whether this rank has the embedding, and whether it has the head.
    """

    first: bool
    last: bool

    def train(
        self,
        gpt: Any,
        micros: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Out],
        loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    ) -> list[S]:
        """As `Backend.forward_backward`: gradients are added to those in megatron-core's buffers.

        Args:
            gpt: megatron-core's model, or this rank's stage of it.
        """
        ...

    def once(self, gpt: Any, make: Callable[[], Out]) -> Out:
        """What `make` returns where the last stage is, of one pass without a gradient, or of one of `train`'s.

        Args:
            make: runs this rank's stage.
        """
        ...


class OneStage:
    """All of a model's layers are on each rank."""

    first = last = True

    def __init__(self, device: torch.device):
        """Compute on `device`."""
        self._device = device

    def train(
        self,
        gpt: Any,
        micros: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Out],
        loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    ) -> list[S]:
        """One micro-batch after the other, forward and backward."""
        found: list[S] = []
        for micro in micros:
            micro = micro.to(self._device)
            scaled, sums = loss(micro, forward(micro))
            with without_gpu(self._device):
                scaled.backward()
            found.append(sums)
        return found

    def once(self, gpt: Any, make: Callable[[], Out]) -> Out:
        """What `make` returns."""
        return make()
