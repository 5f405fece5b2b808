"""megatron-core as a training backend: its layers and tensor parallelism, its buffers of gradients, and its
distributed optimiser, whose state is sharded over the ranks that see different samples."""

# megatron-core is an optional dependency, without types.
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from megatron.core.distributed import finalize_model_grads
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.trainer.backends.fsdp2 import Trainable, clip_held, free_reserve, set_rate
from cairn.trainer.backends.megatron.gpt import MegatronModel, join_ranks
from cairn.trainer.backends.megatron.without_gpu import without_gpu
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import MicroBatch

Out = TypeVar("Out")
S = TypeVar("S")


class MegatronCore:
    """The ranks of a group, of which each `group.tensor.size` neighbours share every matrix.

    What a rank holds of a tensor to be saved is what its optimiser has: a part of its rows or columns, and of
    these the part that the distributed optimiser gives it.
    """

    def __init__(self, group: RankGroup):
        """Train on this group's ranks."""
        join_ranks(group)
        self._group = group
        self.layout = group.layout
        self.averaged_over = group.layout.data.size
        """megatron-core averages gradients over the ranks that see different samples."""

    def lay_out(
        self, model: PreTrainedModel, layers: Sequence[torch.nn.Module], config: TrainerBase
    ) -> PreTrainedModel:
        """Make megatron-core's model of the same configuration; returns a `MegatronModel`."""
        return cast(Any, MegatronModel(model, config, self._group))

    def forward_backward(
        self,
        model: Trainable,
        micros: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Out],
        loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    ) -> list[S]:
        """Gradients are summed in megatron-core's buffers, and over ranks at the end."""
        module = _of(model)
        ddp = module.__dict__["ddp"]
        ddp.zero_grad_buffer()
        found = module.stages.train(module.gpt, micros, forward, loss)
        with without_gpu(self._group.device):
            finalize_model_grads([ddp])
            module.distributed.prepare_grads()
        return found

    def norm_and_clip(self, model: Trainable, limit: float) -> torch.Tensor:
        """Of the optimiser's shards; ranks that share matrices hold copies of what is not cut, and two stages
        those of tied embeddings."""
        named, twice = model.trained(), _of(model).twice
        shards = list(named.values())
        copies = [
            (1 if getattr(shard, "tensor_model_parallel", False) else self._group.tensor.size)
            * (2 if name in twice else 1)
            for name, shard in named.items()
        ]
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        assert len(gradients) == len(shards)
        return clip_held(gradients, copies, limit, self._group.device)

    def step(self, model: Trainable, rate: float) -> None:
        """Each rank changes its shards; then all get the weights of the others."""
        set_rate(model.optimizer, rate)
        with without_gpu(self._group.device):
            _of(model).distributed.step_with_ready_grads()

    def reshard(self, model: PreTrainedModel) -> None:
        """Nothing to do: the weights of a rank are always there."""

    def rest(self) -> None:
        """Free what PyTorch's allocator holds in reserve; does nothing on a CPU."""
        free_reserve()

    def wake(self) -> None:
        """Nothing to do: the allocator takes memory as the next passes ask for it."""


def _of(model: Trainable) -> MegatronModel:
    return cast(Any, model.module)
