"""The protocol of a training backend: the code that lays a model out over ranks, on one page.

The training loop, the losses and the checkpoints know ranks only through what is written here and through the
`RankLayout` of a group (`trainer/group.py`). FSDP2 (`fsdp2.py`) is the first implementation; tensor
parallelism (`tensor.py`) and expert parallelism (`experts.py`), with FSDP2 beside them, and megatron-core
(`megatron/`) are others.

What a rank holds of a tensor is a `Share` (`checkpoint/tensors/placement.py`; `share_of` gives it): shape and
data type of the whole in its hub layout, the ranges of it that are here, a view of their values in place, and
which of the ranks with copies writes them. `Trained` says which tensors there are, by the hub's names:
`saved` of weights, `tensors` of weights and moments, `served` of what is published. Checkpoints are made of
such ranges, so their format does not change with the layout: a step that was saved under one layout is read
under any other. `Scorer` is the forward pass: whole rows in, numbers of whole rows out, on every rank that
shares them.

What holds of every backend and layout, up to the rounding of sums in another order:

- a step's loss, gradient norm and logprobs are those of one process that has the whole model;
- samples that share a row are scored as if alone;
- the shares of all ranks cover each tensor once, and a step saved under one layout resumes under another;
- what is published is what a checkpoint of the step holds;
- no random draw depends on a rank, and a rank that dies, on whatever axis, ends the attempt of all.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.trainer.backends.experts import ExpertParallel
from cairn.trainer.backends.fsdp2 import FSDP2, Trainable
from cairn.trainer.backends.megatron.families import check_megatron
from cairn.trainer.backends.tensor import TensorParallel, check_tensor
from cairn.trainer.group import RankGroup, RankLayout
from cairn.trainer.packing import MicroBatch
from cairn.trainer.router_aux_loss import coefficient_of

Out = TypeVar("Out")
S = TypeVar("S")


class Backend(Protocol):
    """What a model is built by, and what changes its weights; all ranks call each method, in the same order.

    layout: of this rank. averaged_over: a loss is multiplied by this number before its backward pass, since
    gradients become means over so many ranks, where the sum over all samples is wanted.
    """

    layout: RankLayout
    averaged_over: int

    def lay_out(
        self, model: PreTrainedModel, layers: Sequence[torch.nn.Module], config: TrainerBase
    ) -> PreTrainedModel:
        """Divide a model among the ranks. What is on this one gets memory, and no values yet.

        Args:
            model: on the meta device, but for its buffers.
            layers: its decoder layers.

        Returns:
            What computes on this rank: the model itself, changed in place, or a module with its `config`.
        """
        ...

    def forward_backward(
        self,
        model: Trainable,
        micros: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Out],
        loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    ) -> list[S]:
        """Add the gradient of each micro-batch to those that the parameters have.

        Args:
            micros: of this rank; every rank of `layout.data` has equally many.
            forward: the model's forward pass, which gets each micro-batch on the model's device.
            loss: gives, of what `forward` has returned, the scalar that is differentiated, and what the
                caller wants back. It sees logprobs of whole samples, as on one rank.
        """
        ...

    def norm_and_clip(self, model: Trainable, limit: float) -> torch.Tensor:
        """The norm of the whole gradient before it is clipped to `limit`: a scalar, equal on all ranks."""
        ...

    def step(self, model: Trainable, rate: float) -> None:
        """Change the weights by the gradient, with a learning rate."""
        ...

    def reshard(self, model: PreTrainedModel) -> None:
        """Free what passes without a gradient have gathered. The next pass takes anew what it needs."""
        ...

    def rest(self) -> None:
        """Give memory of the device back to other processes, until `wake`; may be called again before that.

        Servers on the same GPU may be awake from now on. No pass and no update runs until `wake`, but weights
        may be read to be published or saved. Any thread may call it.
        """
        ...

    def wake(self) -> None:
        """Take back what passes and updates need; does nothing if that is there. The thread that trains calls
        it, once the servers on the same GPU sleep."""
        ...


def _fsdp2(group: RankGroup) -> Backend:
    if group.tensor.size > 1:
        return TensorParallel(group)
    return ExpertParallel(group) if group.expert.size > 1 else FSDP2(group)


def _megatron(group: RankGroup) -> Backend:
    from cairn.trainer.backends.megatron.megatron import (
        MegatronCore,  # needs megatron-core, which is optional
    )

    return MegatronCore(group)


BACKENDS: dict[str, Callable[[RankGroup], Backend]] = {"fsdp2": _fsdp2, "megatron": _megatron}
"""By the name that the settings have for it."""
CHECKS: dict[str, Callable[[PreTrainedModel, Sequence[torch.nn.Module], TrainerBase], None]] = {
    "fsdp2": lambda model, layers, config: check_tensor(
        model, layers, config.parallel.tensor, config.parallel.expert
    ),
    "megatron": lambda model, layers, config: check_megatron(
        model.config,
        config.parallel,
        coefficient_of(model, config),
        recomputes=config.activation_checkpointing,
    ),
}
"""What raises UsageError, by the same names, if a model can't be laid out over the ranks that the settings
ask for. It is laid out over none yet."""


def make_backend(group: RankGroup) -> Backend:
    """The backend of a run's ranks."""
    return BACKENDS[group.backend](group)
