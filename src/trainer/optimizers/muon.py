"""Muon, with AdamW for what is no hidden matrix."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration (Jordan 2024)."""
SMALLEST = 1e-7
"""Smallest norm that a matrix is divided by."""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024) of the groups whose `kind` is `hidden`, and fused AdamW of the others.

    A matrix moves by its momentum made orthogonal, times 0.2 sqrt(max(rows, columns)) (Liu et al. 2025,
    equation 4), so that updates are as large as AdamW's and its learning rates and weight decays fit. State:
    `momentum_buffer`, float32 and sharded as the matrix is; AdamW's elsewhere.

    An orthogonal update needs the whole matrix. Each rank gathers one matrix after the other, in bfloat16, in
    which the iteration computes, and keeps its shard of the result. Experts that are whole on a rank stay
    there.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        """Take groups of parameters with `kind` and `weight_decay`."""
        groups = list(params)
        hidden = [group for group in groups if group["kind"] == "hidden"]
        others = [group for group in groups if group["kind"] != "hidden"]
        about = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(hidden or [{"params": [], "kind": "hidden", "weight_decay": 0.0}], about)
        self._hidden = list(self.param_groups)
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        if self._adamw:  # both have the same groups and state, whichever is asked
            self.param_groups += self._adamw.param_groups
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Change the weights that have a gradient; all ranks call it."""
        assert closure is None, "Muon evaluates nothing itself"
        for group in self._hidden:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, parameter.grad, group)
        if self._adamw:
            self._adamw.step()

    def _change(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        orthogonal = _orthogonal_shard(update, group["ns_steps"])
        rows, columns = parameter.shape[-2:]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.add_(orthogonal, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)


def _orthogonal_shard(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """This rank's part of the matrix made orthogonal, in float32 and where the matrix is."""
    if not isinstance(matrix, DTensor):
        return orthogonal(matrix.bfloat16(), steps).float()
    mesh, placements = matrix.device_mesh, matrix.placements
    local = matrix.to_local()
    if matrix.ndim == 3 and all(p == Shard(0) or p.is_replicate() for p in placements):
        return orthogonal(local.to(mesh.device_type, torch.bfloat16), steps).to(local.device).float()
    whole = cast(DTensor, matrix.bfloat16()).full_tensor()
    # With state_on = host the matrix is in the host's memory, and the GPU computes.
    done = orthogonal(whole.to(mesh.device_type), steps).to(local.device)
    everywhere = DTensor.from_local(done, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=placements).to_local().float()


def orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: singular values are near 1.

    Args:
        matrix: [rows, columns], or a stack of matrices.
        steps: Newton-Schulz iterations.
    """
    a, b, c = COEFFICIENTS
    multiply = torch.baddbmm if matrix.ndim == 3 else torch.addmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply(gram, gram, gram, beta=b, alpha=c)
        x = multiply(x, polynomial, x, beta=a)
    return x.mT if tall else x
