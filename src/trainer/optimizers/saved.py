"""What checkpoints hold of an optimiser, and what in one can't be saved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cairn.run.errors import UsageError


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The state of all parameters, as `<parameter's name>.<what>`: numbers, and tensors placed as the weight.

    Raises:
        UsageError: something in the state is no plain tensor, so that a resumed run would be without it.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if problem := _problem(value, parameter):
                raise UsageError(
                    f"{type(optimizer).__name__} can't be saved: its state {key!r} of {name} {problem}. "
                    "Checkpoints hold numbers as tensors of shape [], and tensors of a weight's own shape "
                    "and sharding, as torch.zeros_like(parameter) makes them"
                )
            if value is not None:
                found[f"{name}.{key}"] = value
    return found


def _problem(value: Any, parameter: torch.nn.Parameter) -> str | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return f"is of type {type(value).__name__}, not a tensor"
    plain = value.to_local() if isinstance(value, DTensor) else value
    if type(plain) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(plain).__name__}, whose bytes are not its values"
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim:
        return "is a rank's own piece, which says nothing of its place in the whole"
    return None
