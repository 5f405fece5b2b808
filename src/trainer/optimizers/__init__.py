"""What changes the weights: chosen by the `type` that the configuration gives.

An optimiser of your own extends torch.optim.Optimizer and is named as module:Class; see "An optimiser" in
docs/how-to/extending.md.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from cairn.config.optimizer import BaseOptimizerConfig
from cairn.run.extensions import BadExtension, load, make
from cairn.trainer.optimizers.adamw_8bit import AdamW8bit
from cairn.trainer.optimizers.lion import Lion
from cairn.trainer.optimizers.muon import Muon

__all__ = ["OPTIMIZERS", "check_optimizer", "make_optimizer"]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, fused=True),
    "adamw_8bit": AdamW8bit,
    "muon": Muon,
    "sgd": SGD,
    "lion": Lion,
}
"""By type; `cairn.config.optimizer` says what each is made with."""
_IN_LAYER = re.compile(r"(^|\.)\d+\.")


def make_optimizer(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], config: BaseOptimizerConfig
) -> Optimizer:
    """The optimiser that a configuration asks for, of all parameters that are trained.

    Its parameters are in up to three groups, whose `kind` is `hidden` (the matrices of numbered layers, and
    stacks of experts' matrices there), `matrices` (all others, such as embeddings and heads) or `vectors`.
    Weight decay is for the first two.

    Args:
        parameters: each with the model's own name for it.

    Raises:
        BadExtension: a class of the user's can't be found, can't be made, or is no optimiser.
    """
    by_kind: dict[str, list[torch.nn.Parameter]] = {"hidden": [], "matrices": [], "vectors": []}
    for name, parameter in parameters:
        if parameter.requires_grad:
            by_kind[_kind(name, parameter)].append(parameter)
    groups = [
        {"params": members, "kind": kind, "weight_decay": 0.0 if kind == "vectors" else config.weight_decay}
        for kind, members in by_kind.items()
        if members
    ]
    cls = load(config.type, OPTIMIZERS, "optimizer.type", group="cairn.optimizers")
    arguments: dict[str, Any] = {"lr": config.lr, **config.arguments()}
    optimizer = make(partial(cls, groups), arguments, "optimizer.args")
    if not isinstance(optimizer, Optimizer):
        raise BadExtension(f"optimizer.type = {config.type!r}: it does not extend torch.optim.Optimizer")
    return optimizer


def _kind(name: str, parameter: torch.nn.Parameter) -> str:
    if parameter.ndim < 2:
        return "vectors"
    is_matrix = parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name.split("."))
    return "hidden" if is_matrix and _IN_LAYER.search(name) else "matrices"


def check_optimizer(config: BaseOptimizerConfig) -> None:
    """Make a user's own optimiser once, of a small model, to refuse what does not fit before anything starts.

    Raises:
        BadExtension: see `make_optimizer`.
    """
    if config.is_own:
        make_optimizer(torch.nn.Linear(2, 2).named_parameters(), config)
