"""Lion."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): every weight moves by the learning rate, up or down.

    It is the sign of a mean of the gradient and `exp_avg`, an exponential mean of earlier ones. Usual
    learning rates are a third to a tenth of AdamW's, with as many times the weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        """`betas`: share of the mean in the update, and the mean's decay rate; both from 0 to below 1."""
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas}: both must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Change the weights that have a gradient."""
        assert closure is None, "Lion evaluates nothing itself"
        for group in self.param_groups:
            of_update, of_mean = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                # Each value stands for itself, so shards are all that is needed.
                weight, gradient, mean = map(_local, (parameter, parameter.grad, state["exp_avg"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(mean.lerp(gradient, 1 - of_update).sign_(), alpha=group["lr"])
                mean.lerp_(gradient, 1 - of_mean)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
