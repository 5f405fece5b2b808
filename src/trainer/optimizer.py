"""AdamW and its learning rate."""

import math
from collections.abc import Iterable

import torch

from cairn.config.trainer import OptimizerConfig, SchedulerConfig


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, optimizer: OptimizerConfig, scheduler: SchedulerConfig, end: int) -> float:
    """The rate of optimiser step `step`, counted from 1; `end` is where linear and cosine arrive.

    It depends on nothing else, so a resumed run needs only its step.
    """
    warmup = scheduler.warmup_steps
    if step <= warmup:
        return optimizer.lr * step / warmup
    if scheduler.type == "constant":
        return optimizer.lr
    done = min((step - warmup) / max(end - warmup, 1), 1.0)
    fall = (1 + math.cos(math.pi * done)) / 2 if scheduler.type == "cosine" else 1 - done
    return optimizer.lr * (scheduler.min_lr_ratio + (1 - scheduler.min_lr_ratio) * fall)
