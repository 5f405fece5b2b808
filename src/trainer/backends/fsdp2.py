"""FSDP2 as a training backend: weights sharded layer by layer over all ranks, whatever samples these see."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.config.trainer import TrainerBase
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import MicroBatch

Out = TypeVar("Out")
S = TypeVar("S")


class Trainable(Protocol):
    """What a backend trains (`Trained`): what computes, and the optimiser of some of its parameters."""

    module: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """What the optimiser changes, by the model's own names."""
        ...


class FSDP2:
    """The ranks of a group, with every model sharded over all of them, or over those of each replica.

    What a rank holds of a tensor is a piece of its first dimension, one range of the whole.
    """

    def __init__(self, group: RankGroup):
        """Train on this group's ranks."""
        self._group = group
        self.layout = group.layout
        self.averaged_over = group.world_size // group.repeats
        """FSDP2 averages gradients over all ranks, also over those that share samples: each of these has the
        gradient of its own tokens, and the sum is wanted. If each has that of all tokens, it counts once."""

    def lay_out(
        self, model: PreTrainedModel, layers: Sequence[torch.nn.Module], config: TrainerBase
    ) -> PreTrainedModel:
        """Shard it in place, and give the shards memory: no rank ever holds the whole model.

        A single rank that computes in float32 where its weights are has nothing to shard or to convert: it
        keeps the plain model, which is faster and computes the same bits.
        """
        mesh = self._group.mesh
        how = arguments_of(mesh, config)
        on_host, plain = config.state_on == "host", MixedPrecisionPolicy(torch.float32, torch.float32)
        if mesh.size() > 1 or on_host or how["mp_policy"] != plain:
            shard(model, layers, how, keep_gathered=bool(config.keep_gathered))
        allocate(model, "cpu" if on_host else mesh.device_type)
        return model

    def forward_backward(
        self,
        model: Trainable,
        micros: Sequence[MicroBatch],
        forward: Callable[[MicroBatch], Out],
        loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    ) -> list[S]:
        """Every micro-batch's gradient is reduced at once, so a rank holds that of its shards alone."""
        return one_by_one(self._group.device, micros, forward, loss)

    def norm_and_clip(self, model: Trainable, limit: float) -> torch.Tensor:
        """All parameters are on one mesh, as torch's function wants it."""
        norm = torch.nn.utils.clip_grad_norm_(model.trained().values(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, model: Trainable, rate: float) -> None:
        """The optimiser's own step changes a rank's shards."""
        set_rate(model.optimizer, rate)
        model.optimizer.step()

    def reshard(self, model: PreTrainedModel) -> None:
        """See the function `reshard`."""
        reshard(model)

    def rest(self) -> None:
        """Free what PyTorch's allocator holds in reserve; does nothing on a CPU.

        Weights and the optimiser's state stay where they are: the launcher has left the servers room beside
        them (`launch/plan/colocation.py`).
        """
        free_reserve()

    def wake(self) -> None:
        """Nothing to do: the allocator takes memory as the next passes ask for it."""


def one_by_one(
    device: torch.device,
    micros: Sequence[MicroBatch],
    forward: Callable[[MicroBatch], Out],
    loss: Callable[[MicroBatch, Out], tuple[torch.Tensor, S]],
    backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[S]:
    """Each micro-batch forward and backward before the next one; see `Backend.forward_backward`.

    Args:
        backward: makes the context of a backward pass.
    """
    found: list[S] = []
    for micro in micros:
        micro = micro.to(device)
        scaled, sums = loss(micro, forward(micro))
        with backward():
            scaled.backward()
        found.append(sums)
    return found


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameters of an optimiser a learning rate."""
    for parameters in optimizer.param_groups:
        parameters["lr"] = rate


def free_reserve() -> None:
    """Free what PyTorch's allocator holds in reserve on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def arguments_of(mesh: DeviceMesh, config: TrainerBase) -> dict[str, Any]:
    """Arguments of `fully_shard`: over which ranks, in which data types, and where the shards are."""
    on_gpu = mesh.device_type == "cuda"
    precision = config.precision.settled(gpu=on_gpu)
    compute, reduce = DTYPES_IN_SETTINGS[precision.compute], DTYPES_IN_SETTINGS[precision.reduce]
    return {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
        "offload_policy": CPUOffloadPolicy(on_gpu) if config.state_on == "host" else OffloadPolicy(),
    }


@torch.no_grad()
def allocate(model: PreTrainedModel, device: str) -> None:
    """Give the weights, or this rank's shards of them, memory on `device`; their values are undefined."""

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    if isinstance(model, FSDPModule):  # which has moved the buffers, and takes note of new shards here
        model._apply(allocated)  # pyright: ignore[reportPrivateUsage] # `to_empty` would clear the buffers
        return
    for parameter in model.parameters():
        if parameter.is_meta:  # others are shared with a model that is in memory
            blank = torch.nn.Parameter(allocated(parameter), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, blank)  # in place, so that what is tied stays tied
    model.to(device)  # pyright: ignore[reportArgumentType] # transformers' decorator hides the parameters


def shard(
    model: PreTrainedModel,
    layers: Sequence[torch.nn.Module],
    how: Mapping[str, Any],
    *,
    keep_gathered: bool,
    layer_mesh: DeviceMesh | None = None,
) -> None:
    """Make units of what is gathered together: each layer, and the embeddings of input and output.

    Tied embeddings are gathered with the rest, from the forward pass to the end of the backward pass.

    Args:
        how: arguments of `fully_shard`.
        keep_gathered: whether layers stay gathered from the forward to the backward pass; what they compute
            is the same. A pass without a backward one leaves them so, hence `reshard`.
        layer_mesh: the ranks over which layers are sharded; default: as all else.
    """
    of_layers = {**how, "mesh": layer_mesh or how["mesh"]}
    for layer in layers:
        fully_shard(layer, **of_layers, reshard_after_forward=not keep_gathered)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embeddings.weight:
        unit = fully_shard(embeddings, **how)
        # The gradient of a look-up does not depend on the values.
        unit.set_unshard_in_backward(not isinstance(embeddings, torch.nn.Embedding))
        # The backward pass begins with the head, which therefore stays gathered.
        fully_shard(head, **how, reshard_after_forward=False)
    fully_shard(model, **how)


def reshard(model: PreTrainedModel) -> None:
    """Free what a forward pass without a backward pass has left gathered.

    Otherwise the next forward pass would compute with it, also if the weights have changed since.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# torch refuses to take the norm of a gradient whose parameters are on several meshes, as they are with ranks
# that share matrices or experts.


def clip_on_meshes(
    parameters: Mapping[str, torch.nn.Parameter], limit: float, world_size: int
) -> torch.Tensor:
    """Clip the gradient of all `parameters` to a norm of `limit`, in place; all ranks call it.

    Args:
        parameters: DTensors with a gradient, each on a mesh of some of the ranks, or of all.

    Returns:
        The norm before: float32 [], equal on all ranks.
    """
    gradients = [local_gradient(parameter) for parameter in parameters.values()]
    copies = [copies_of(parameter, world_size) for parameter in parameters.values()]
    return clip_held(gradients, copies, limit, gradients[0].device)


@torch.no_grad()
def clip_held(
    gradients: list[torch.Tensor], copies: Sequence[int], limit: float, device: torch.device
) -> torch.Tensor:
    """The same, by what each rank holds of the gradient.

    Args:
        gradients: this rank's values, of no parameter perhaps.
        copies: how many ranks hold those of each parameter.
        device: of all ranks' values.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage] # as torch clips
        counts = torch.tensor(copies, dtype=torch.float64, device=device)
        total = (torch.stack(norms).double().square() / counts).sum()
    dist.all_reduce(total)
    norm = total.sqrt().float()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage] # likewise
    return norm


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's values of a parameter's gradient, sharing its memory."""
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def copies_of(parameter: torch.nn.Parameter, world_size: int) -> int:
    """How many of the ranks hold the values of a parameter that this one holds."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    copies = world_size // mesh.size()
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return copies
