"""Expert parallelism: ranks have some experts of each layer whole, and tokens travel to their experts.

Which modules are experts is transformers' knowledge (`plans.py`), and so is the exchange: a rank sends the
hidden states of each of its tokens, in one all-to-all, to the ranks that have the experts which the router
has chosen; these compute, and a second all-to-all brings the results back. A rank gathers its own experts
alone where FSDP2 would gather all of a layer. Routers see their own rank's tokens, as without it.

The rest of the model is sharded by FSDP2 over all ranks, and each rank's experts over the ranks that have the
same ones. A rank computes what its experts add to the loss of all ranks of its group, so the gradients of
experts are divided by the number of all ranks, as those of the rest of the model are. Where ranks share the
matrices of layers as well (`tensor.py`), they have the same tokens, of which each sends its part.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import name_of
from cairn.trainer.backends.fsdp2 import FSDP2, Trainable, arguments_of, clip_on_meshes
from cairn.trainer.backends.plans import cut_experts, experts_in, experts_plan, style_of
from cairn.trainer.group import RankGroup, undivided

CUT = "grouped_gemm"
"""The style of parameters [experts, ...] of which each rank has some experts."""


class ExpertParallel(FSDP2):
    """The ranks of a group, of which each `group.expert.size` neighbours have a layer's experts together.

    What a rank holds of a tensor of all experts is a piece of its own ones: some of them, or a part of each.
    """

    def lay_out(
        self, model: PreTrainedModel, layers: Sequence[torch.nn.Module], config: TrainerBase
    ) -> PreTrainedModel:
        """Deal the experts out to the ranks of each group, and shard these and all else.

        Raises:
            UsageError: the model's experts can't be dealt out.
        """
        deal_out(model, layers, self._group, config)
        return super().lay_out(model, layers, config)

    def norm_and_clip(self, model: Trainable, limit: float) -> torch.Tensor:
        """The experts are on another mesh than the rest."""
        parameters = model.trained().items()
        trained = {name: parameter for name, parameter in parameters if parameter.grad is not None}
        return clip_on_meshes(trained, limit, self._group.world_size)


def deal_out(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], group: RankGroup, config: TrainerBase
) -> None:
    """Give the ranks that have experts together equally many of each layer, and shard these over the others.

    A model without experts, such as one that scores batches beside the policy, stays as it is.

    Raises:
        UsageError: the model's experts can't be dealt out.
    """
    if not has_experts(model):
        return
    ranks, mesh = group.expert.size, group.expert_mesh
    assert mesh is not None
    check_experts(model, layers, ranks)
    plan = experts_plan(model, layers)
    cut_experts(model, mesh["expert"], plan, group.layer_mesh["tensor"] if group.layer_mesh else None)
    how = arguments_of(group.mesh, config)
    # Weights of routing come in float32, also where layers compute in 16 bits.
    how["mp_policy"] = replace(how["mp_policy"], cast_forward_inputs=False)
    how["mesh"] = undivided(mesh)
    shards = mesh["shard"].size()
    for experts in experts_in(model, plan):
        unit = fully_shard(
            experts,
            **how,
            reshard_after_forward=not config.keep_gathered,
            shard_placement_fn=_placing(ranks, shards),
        )
        # As often as the gradients of the rest of the layers are there: on ranks that share matrices once.
        unit.set_gradient_divide_factor(group.world_size / group.tensor.size)
        # gloo can't multiply in a sum. With one shard nothing is summed: FSDP2 would divide twice.
        unit.set_force_sum_reduction_for_comms(group.device.type == "cpu" and shards > 1)


def sharded_dimension(shape: Sequence[int], ranks: int, shards: int) -> int:
    """The dimension along which FSDP2 cuts a rank's part of a parameter of all experts.

    It is the experts, if there are equally many for each shard; else the rows of each, if these are.

    Args:
        shape: of all experts together, [experts, ...].
        ranks: that have the experts together.
        shards: ranks that have the same experts.
    """
    even = shape[0] // ranks % shards == 0
    return 1 if not even and len(shape) > 2 and shape[1] % shards == 0 else 0


def _placing(ranks: int, shards: int) -> Callable[[torch.nn.Parameter], Shard]:
    return lambda parameter: Shard(sharded_dimension(parameter.shape, ranks, shards))


def has_experts(model: torch.nn.Module) -> bool:
    """Whether a token passes through some of several experts in the model."""
    return any("experts" in name.split(".") for name, _ in model.named_modules())


def check_experts(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], ranks: int, *, needed: bool = True
) -> None:
    """Check that so many ranks can have the experts of the layers together.

    Args:
        model: laid out over no ranks yet.
        needed: whether a model without experts is refused.

    Raises:
        UsageError: they can't.
    """
    if ranks > 1 and (problem := _problem(cast(PreTrainedModel, model), layers, ranks, needed)):
        raise UsageError(f"parallel.expert = {ranks} can't serve {name_of(model)}: {problem}")


def _problem(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], ranks: int, needed: bool
) -> str | None:
    if not has_experts(model):
        return "its layers have no experts; leave it out" if needed else None
    plan = experts_plan(model, layers)
    if not plan:
        return "transformers has no plan by which tokens travel to its experts"
    planned = {id(parameter) for experts in experts_in(model, plan) for parameter in experts.parameters()}
    for name, parameter in model.named_parameters():
        of_experts = id(parameter) in planned
        if ("experts" in name.split(".")) != of_experts or (of_experts and style_of(plan, name) != CUT):
            return f"transformers' plan shares its experts in a way that was not tried ({name})"
        if of_experts and parameter.shape[0] % ranks:
            return (
                f"its {parameter.shape[0]} experts can't be shared equally; take a number that divides them"
            )
    return None
