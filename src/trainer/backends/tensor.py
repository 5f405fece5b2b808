"""Tensor parallelism: ranks share each matrix of a model's layers, with FSDP2 over the ranks that do not.

How a family's layers are cut is transformers' knowledge: each model class has a plan, which says for each
module whether its matrix is cut by columns or by rows, and where results are summed or gathered (`plans.py`).
An adapter is cut as its layer is: the one of its matrices that has the layer's cut side. Experts are dealt
out (`experts.py`), and tokens travel to them; each rank of a tensor axis sends its part of them.

Outside the layers, each rank of a tensor axis has the same hidden states. Embeddings, the last norm and the
head are therefore sharded by FSDP2 over all ranks, and each rank scores its own part of the learned tokens
(`attention.context.part_of_rows`), of those that its context axis leaves it. A loss is scaled as if gradients
were averaged over all ranks, and those of the embeddings and the head are. Within the layers they are
averaged over the other ranks alone; therefore the gradient of hidden states, which each rank has of its own
tokens, becomes the mean over the tensor axis where it enters the layers.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import DRAWN, DROPOUTS, draws_numbers, name_of
from cairn.trainer.backends.experts import deal_out, has_experts
from cairn.trainer.backends.fsdp2 import (
    FSDP2,
    Trainable,
    allocate,
    arguments_of,
    clip_on_meshes,
    local_gradient,
    shard,
)
from cairn.trainer.backends.plans import (
    adapted_in,
    cut_matrices,
    decoder_of,
    matrices_plan,
    names_of,
    style_of,
)
from cairn.trainer.group import NO_AXIS, Axis, RankGroup, undivided

PARTIAL = "replicated_with_grad_allreduce"
"""The style of a norm of heads: each rank has the gradient of its own heads."""
CUT = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "colwise_rep": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "rowwise_rep": 1,
}
"""The styles that cut a matrix of [outputs, inputs], and which dimension."""
SAME = 1e-2
"""Largest relative difference between norms of one gradient on ranks that hold copies."""


class TensorParallel(FSDP2):
    """The ranks of a group, of which each `group.tensor.size` neighbours share every matrix of the layers.

    What a rank holds of a matrix that is cut are its rows, or some columns of each row, and of these the part
    that FSDP2 gives it.
    """

    def __init__(self, group: RankGroup):
        """Train on this group's ranks."""
        super().__init__(group)
        self._copies_checked = False

    def lay_out(
        self, model: PreTrainedModel, layers: Sequence[torch.nn.Module], config: TrainerBase
    ) -> PreTrainedModel:
        """Cut the layers by transformers' plan, and shard what each rank has of them.

        Raises:
            UsageError: the model's layers can't be cut.
        """
        group, mesh = self._group, self._group.layer_mesh
        assert mesh is not None
        check_tensor(model, layers, group.tensor.size, group.expert.size)
        plan = plan_of(model, layers)
        partial = [name for name, _ in model.named_parameters() if style_of(plan, name) == PARTIAL]
        # Not with transformers' hook, which would sum the gradients of all tokens after each micro-batch.
        cut = {name: style for name, style in plan.items() if style != PARTIAL}
        cut_matrices(model, mesh["tensor"], cut)
        if group.expert.size > 1:
            deal_out(model, layers, group, config)
        how = arguments_of(group.mesh, config)
        shard(model, layers, how, keep_gathered=bool(config.keep_gathered), layer_mesh=undivided(mesh))
        allocate(model, "cpu" if config.state_on == "host" else group.device.type)
        decoder_of(model, layers)[1].register_forward_hook(_enter_layers(group.tensor))
        parameters = dict(model.named_parameters())
        _PARTIAL.update({parameters[name]: True for name in partial})
        _AXES[model] = group.tensor
        return model

    def norm_and_clip(self, model: Trainable, limit: float) -> torch.Tensor:
        """The parameters are on two meshes, and some ranks hold copies of norms and biases.

        Raises:
            UsageError: ranks with copies of a parameter have other gradients, since transformers' plan leaves
                out that each of them has a part.
        """
        parameters = model.trained().items()
        trained = {name: parameter for name, parameter in parameters if parameter.grad is not None}
        with torch.no_grad():
            self._sum([local_gradient(one) for one in trained.values() if one in _PARTIAL])
            if not self._copies_checked:
                copied = {name: one for name, one in trained.items() if self._is_copied(one)}
                self._check_copies({name: local_gradient(one).norm() for name, one in copied.items()})
                self._copies_checked = True
        return clip_on_meshes(trained, limit, self._group.world_size)

    def _is_copied(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the ranks of the tensor axis hold copies: it is in a layer, and not cut."""
        assert isinstance(parameter, DTensor)
        return parameter.device_mesh.size() < self._group.world_size

    def _sum(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add up, in place, what each rank of the tensor axis has of some gradients."""
        if not gradients:
            return
        flat = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(flat, group=self._group.tensor.group)
        for one, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(summed.view_as(one))

    def _check_copies(self, norms: Mapping[str, torch.Tensor]) -> None:
        axis = self._group.tensor
        mine = torch.stack(list(norms.values())) if norms else torch.zeros(0, device=self._group.device)
        of_ranks = [torch.empty_like(mine) for _ in range(axis.size)]
        dist.all_gather(of_ranks, mine, group=axis.group)
        table = torch.stack(of_ranks)
        apart = (table.amax(0) - table.amin(0) > SAME * table.amax(0)).tolist()
        if wrong := [name for name, differs in zip(norms, apart, strict=True) if differs]:
            raise UsageError(
                f"parallel.tensor = {axis.size}: ranks that hold copies of {wrong[0]} have different "
                "gradients of it, so transformers' plan for this family lacks an exchange; leave it out"
            )


_AXES: "weakref.WeakKeyDictionary[torch.nn.Module, Axis]" = weakref.WeakKeyDictionary()
_PARTIAL: Any = WeakIdKeyDictionary()
"""Parameters of which each rank of a tensor axis has a part of the gradient."""


def tensor_axis(model: torch.nn.Module) -> Axis:
    """The ranks that share the matrices of a model's layers with this one."""
    return _AXES.get(model, NO_AXIS)


def plan_of(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> dict[str, str]:
    """transformers' plan for the matrices of the layers, and the same for adapters of them."""
    plan = matrices_plan(model, layers)
    for name, adapter in adapted_in(model).items():
        if style := plan.pop(name, None):
            matrix = "lora_B" if CUT.get(style) == 0 else "lora_A"  # [outputs, rank], [rank, inputs]
            plan |= {f"{name}.base_layer": style, f"{name}.{matrix}.{adapter}": style}
    return plan


def check_tensor(model: torch.nn.Module, layers: Sequence[torch.nn.Module], ranks: int, expert: int) -> None:
    """Check that so many ranks can share the matrices of the layers.

    Args:
        model: laid out over no ranks yet.
        expert: ranks that have the experts of each layer together.

    Raises:
        UsageError: they can't.
    """
    if ranks > 1 and (problem := _problem(cast(PreTrainedModel, model), layers, ranks, expert)):
        raise UsageError(f"parallel.tensor = {ranks} can't serve {name_of(model)}: {problem}")


def _problem(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], ranks: int, expert: int
) -> str | None:
    config = model.config.get_text_config()
    if expert == 1 and has_experts(model):
        return "its layers have experts, which it does not cut; parallel.expert beside it deals them out"
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers of the kind {min(kinds)} were not tried"
    if len({_stack_of(model, layer) for layer in layers}) != 1:
        return "it has more than one stack of layers"
    plan = plan_of(model, layers)
    if not plan:
        return "transformers has no plan that says how its layers are cut"
    if unknown := {style for style in plan.values() if style not in CUT and style != PARTIAL}:
        return f"transformers' plan cuts its layers in a way that was not tried ({min(unknown)})"
    for what, name in (("attention heads", "num_attention_heads"), ("key heads", "num_key_value_heads")):
        heads: int = getattr(config, name, None) or 0
        if heads % ranks:
            return f"its {heads} {what} can't be shared equally; take a number that divides them"
    for name, parameter in model.named_parameters():
        cut = CUT.get(style_of(plan, name) or "")
        if cut is not None and parameter.ndim == 2 and parameter.shape[cut] % ranks:
            length, what = parameter.shape[cut], ("rows", "columns")[cut]
            return f"{name} has {length} {what}, which can't be shared equally"
    if draws_numbers(model, (*DRAWN, *DROPOUTS)):
        return "it has dropout or noise, whose draws for a head would depend on the rank that computes it"
    return None


def _stack_of(model: torch.nn.Module, layer: torch.nn.Module) -> str:
    """What the names of a layer and of its neighbours begin with."""
    return names_of(model, [layer])[0].rpartition(".")[0]


def _enter_layers(axis: Axis) -> Any:
    """A hook for the output of the layers' model: its gradient becomes the mean over the axis."""

    def of_own_tokens(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = _MeanGradient.apply(output.last_hidden_state, axis)
        return output

    return of_own_tokens


class _MeanGradient(torch.autograd.Function):
    """Hidden states as they are, whose gradient is the mean of what the ranks of an axis have."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.axis.group)
        return summed.div_(ctx.axis.size), None
