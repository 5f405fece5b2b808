"""How micro-batches go through the stages of a model: consecutive layers, each stage on ranks of its own.

With several stages, megatron-core's schedule has each rank go forward with a few micro-batches ahead, and
then forward with one and backward with another in turn (1F1B; Narayanan et al. 2021, arXiv:2104.04473,
section 2.2.1). The last stage alone computes logprobs and the loss. What it has computed the others get at
the end, and each makes of it the sums that it reports, so that a step looks the same on all ranks.
"""

# megatron-core is an optional dependency, without types.
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch.utils._pytree import tree_leaves  # torch has no public one

from cairn.trainer.backends.fsdp2 import one_by_one
from cairn.trainer.backends.megatron.without_gpu import without_gpu
from cairn.trainer.group import Axis
from cairn.trainer.packing import MicroBatch

Out = TypeVar("Out")
S = TypeVar("S")


class Stages(Protocol):
    """Runs passes through all stages of a model; all ranks that share samples call each method together.

    first, last: whether this rank has the embedding, and whether it has the head. passed: where this rank has
    no head, what its newest pass gives to the next stage.
    """

    first: bool
    last: bool
    passed: torch.Tensor | None

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
        """What `make` returns on the last stage, of a pass of its own without a gradient.

        Args:
            make: runs this rank's stage. Where that is not the last one it returns tensors of the same shapes
                and types.
        """
        ...


class OneStage:
    """All of a model's layers are on each rank."""

    first = last = True
    passed: torch.Tensor | None = None

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
        return one_by_one(self._device, micros, forward, loss, lambda: without_gpu(self._device))

    def once(self, gpt: Any, make: Callable[[], Out]) -> Out:
        """What `make` returns."""
        return make()


class Pipeline:
    """Each rank has one of several stages, and micro-batches go through them at the same time."""

    passed: torch.Tensor | None = None

    def __init__(self, axis: Axis, ranks: dist.ProcessGroup, device: torch.device):
        """Have one stage of `axis`, whose ranks are `ranks`, in the order of the stages."""
        self.first, self.last = axis.rank == 0, axis.rank == axis.size - 1
        self._ranks, self._device = ranks, device
        self._end = dist.get_process_group_ranks(ranks)[-1]
        self._in_train = False

    def train(
        self,
        gpt: Any,
        micros: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Out],
        loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    ) -> list[S]:
        """Forward and backward in turn; the sums of other stages are made of the last one's outputs."""
        micros = [micro.to(self._device) for micro in micros]
        outputs: list[Out] = []
        found: list[S] = []

        def one(left: Any, _: Any) -> tuple[torch.Tensor, None]:
            micro = next(left)
            outputs.append(forward(micro))
            if not self.last:
                return self._taken(), None
            scaled, sums = loss(micro, outputs[-1])
            found.append(sums)
            return scaled, None

        self._in_train = True
        try:
            self._run(gpt, one, micros, forward_only=False)
        finally:
            self._in_train = False
        for output in outputs:
            self._send_from_end(output)
        if not self.last:
            with torch.no_grad():
                found = [loss(micro, output)[1] for micro, output in zip(micros, outputs, strict=True)]
        return found

    def once(self, gpt: Any, make: Callable[[], Out]) -> Out:
        """What the last stage makes; within `train`, what this one does."""
        if self._in_train:
            return make()
        made: list[Out] = []

        def one(left: Any, _: Any) -> tuple[torch.Tensor, None]:
            made.append(make())
            return torch.zeros((), device=self._device) if self.last else self._taken(), None

        with torch.no_grad():
            self._run(gpt, one, [None], forward_only=True)
        self._send_from_end(made[0])
        return made[0]

    def _run(self, gpt: Any, one: Callable[..., Any], passes: Sequence[Any], *, forward_only: bool) -> None:
        """Have megatron-core's schedule call `one` for each pass; shapes travel with hidden states."""
        with without_gpu(self._device):
            forward_backward_pipelining_without_interleaving(
                forward_step_func=one,
                data_iterator=iter(passes),
                model=gpt,
                num_microbatches=len(passes),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _taken(self) -> torch.Tensor:
        passed, self.passed = self.passed, None
        assert passed is not None
        return passed

    def _send_from_end(self, output: Any) -> None:
        """Replace the values of an output's tensors by those that the last stage has."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                values = tensor.detach().contiguous()  # gloo would send whatever lies in memory in one piece
                dist.broadcast(values, self._end, group=self._ranks)
                if not self.last:
                    tensor.detach().copy_(values)
