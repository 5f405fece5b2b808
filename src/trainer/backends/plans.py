"""transformers' plans: how the matrices of a family's layers are shared among ranks.

A plan names modules and parameters, with `*` for numbers, and the style in which each is cut. All calls of
transformers' code for plans are in this file; what styles mean for gradients is known by those who ask for
them (`tensor.py`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)


def matrices_plan(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Styles by name of what is cut when ranks share the matrices of the layers; empty without a plan."""
    prefix, decoder = decoder_of(model, layers)
    return _within(model, layers, {f"{prefix}{name}": style for name, style in decoder.tp_plan.items()})


def cut_matrices(model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Cut the parameters that a plan names over the ranks of a mesh, and have modules exchange results."""
    apply_tensor_parallelism(model, mesh, dict(plan))


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
