"""transformers' plans: how the matrices and the experts of a family's layers are shared among ranks.

A plan names modules and parameters, with `*` for numbers, and the style in which each is cut. All calls of
transformers' code for plans are in this file; what styles mean for gradients is known by those who ask for
them (`tensor.py`, `experts.py`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    apply_expert_parallelism,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)


def matrices_plan(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Styles by name of what is cut when ranks share the matrices of the layers; empty without a plan.

    Experts are not: they are dealt out (`experts_plan`).
    """
    prefix, decoder = decoder_of(model, layers)
    plan = _within(model, layers, {f"{prefix}{name}": style for name, style in decoder.tp_plan.items()})
    return {name: style for name, style in plan.items() if "experts" not in name.split(".")}


def adapted_in(model: torch.nn.Module) -> dict[str, str]:
    """What PEFT calls the adapter of each layer that has one, by the layer's name as plans have it."""
    return {
        replace_layer_number_by_wildcard(name.removesuffix(".lora_A")): next(
            name for name, _ in module.named_children()
        )
        for name, module in model.named_modules()
        if name.endswith(".lora_A")
    }


def cut_matrices(model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Cut the parameters that a plan names over the ranks of a mesh, and have modules exchange results."""
    apply_tensor_parallelism(model, mesh, dict(plan))


DISPATCHED = "ep_dispatch_experts"
"""The style of a module of experts whose tokens come from other ranks and go back."""


def experts_plan(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> dict[str, str]:
    """The same of modules of experts, and of their parameters; empty without a plan."""
    having = [layer for layer in layers if any("experts" in n.split(".") for n, _ in layer.named_modules())]
    if not having:
        return {}
    prefix, decoder = decoder_of(model, having)
    plan = _within(model, having, {f"{prefix}{name}": style for name, style in decoder.ep_plan.items()})
    experts = [name for name, style in plan.items() if style == DISPATCHED]
    return {n: style for n, style in plan.items() if any(f"{n}.".startswith(f"{one}.") for one in experts)}


def experts_in(model: torch.nn.Module, plan: Mapping[str, str]) -> list[torch.nn.Module]:
    """The modules of experts that a plan names, one for each layer that has them."""
    wild = {name: replace_layer_number_by_wildcard(name) for name, _ in model.named_modules()}
    return [module for name, module in model.named_modules() if plan.get(wild[name]) == DISPATCHED]


def cut_experts(
    model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str], sharing: DeviceMesh | None
) -> None:
    """Give each rank of a mesh equally many experts of each layer, and have modules exchange tokens.

    Args:
        sharing: ranks that have the same tokens. Each sends its part of them, and all get all results.
    """
    apply_expert_parallelism(model, mesh, sharing, dict(plan))  # pyright: ignore[reportArgumentType] # None is allowed for


def style_of(plan: Mapping[str, str], parameter: str) -> str | None:
    """The style of a parameter's module, or its own."""
    name = replace_layer_number_by_wildcard(parameter)
    return plan.get(name) or plan.get(name.rpartition(".")[0])


def decoder_of(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> tuple[str, PreTrainedModel]:
    """The innermost of transformers' models that has the layers, and what names in it begin with."""
    first = names_of(model, layers[:1])[0]
    around = [
        (name and f"{name}.", module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and first.startswith(name and f"{name}.")
    ]
    return around[-1]


def names_of(model: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> list[str]:
    """The names of some modules of a model, in its order."""
    numbers = {id(module) for module in modules}
    return [name for name, module in model.named_modules() if id(module) in numbers]


def _within(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], plan: Mapping[str, str]
) -> dict[str, str]:
    """What of a plan is within the layers."""
    inside = {replace_layer_number_by_wildcard(name) for name in names_of(model, layers)}
    return {name: style for name, style in plan.items() if any(name.startswith(f"{one}.") for one in inside)}
