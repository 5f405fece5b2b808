"""Muon, with AdamW for what is no hidden matrix."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
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

    An orthogonal update needs the whole matrix. Matrices are dealt to the ranks that share them: each
    gathers one, in bfloat16, in which the iteration computes, and sends the others their shards of the
    result. Experts that are whole on a rank stay there.
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
            dealt: list[_Dealt] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._update(parameter, parameter.grad, group)
                share = _Dealt.of(parameter, update)
                if share is None:
                    _change(parameter, _orthogonal_shard(update, group["ns_steps"]), group)
                    continue
                if dealt and (len(dealt) == dealt[0].ranks or dealt[0].among is not share.among):
                    _make_orthogonal(dealt, group)
                    dealt = []
                dealt.append(share)
            _make_orthogonal(dealt, group)
        if self._adamw:
            self._adamw.step()

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean


def _change(parameter: torch.Tensor, orthogonal: torch.Tensor, group: dict[str, Any]) -> None:
    """Move a matrix. orthogonal: this rank's part of its update, float32."""
    rows, columns = parameter.shape[-2:]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.add_(orthogonal, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)


@dataclass(frozen=True)
class _Dealt:
    """A matrix whose rows lie on several ranks, those of `among`; update: this rank's rows."""

    parameter: DTensor
    update: torch.Tensor
    among: dist.ProcessGroup
    ranks: int
    device: str

    @classmethod
    def of(cls, parameter: torch.Tensor, update: torch.Tensor) -> "_Dealt | None":
        """None for what can't be dealt: plain tensors, stacks of experts, shards in several dimensions."""
        if not isinstance(parameter, DTensor) or not isinstance(update, DTensor) or parameter.ndim != 2:
            return None
        mesh = parameter.device_mesh
        cut = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if len(cut) != 1 or parameter.placements[cut[0]] != Shard(0) or mesh.size(cut[0]) == 1:
            return None
        return cls(parameter, update.to_local(), mesh.get_group(cut[0]), mesh.size(cut[0]), mesh.device_type)

    @property
    def each(self) -> int:
        """Rows that a rank has, if they do not run out."""
        return -(-self.parameter.shape[0] // self.ranks)

    def empty(self) -> torch.Tensor:
        """Memory for the rows of one rank, bfloat16."""
        return torch.zeros(self.each, self.parameter.shape[1], dtype=torch.bfloat16, device=self.device)


def _make_orthogonal(dealt: Sequence[_Dealt], group: dict[str, Any]) -> None:
    """Change matrices, at most as many as there are ranks: the n-th rank computes the n-th one's update."""
    if not dealt:
        return
    among = dealt[0].among
    rank = among.rank()
    works: list[Any] = []
    mine: list[torch.Tensor] | None = None
    for owner, one in enumerate(dealt):
        rows = one.empty()
        rows[: len(one.update)] = one.update  # with state_on = host, on its way to the GPU that computes
        into = [one.empty() for _ in range(one.ranks)] if owner == rank else None
        mine = into or mine
        works.append(dist.gather(rows, into, group=among, group_dst=owner, async_op=True))
    for work in works:
        work.wait()
    pieces: list[torch.Tensor] | None = None
    if mine is not None:
        one = dealt[rank]
        whole = torch.cat(mine)
        rows = one.parameter.shape[0]
        whole[:rows] = orthogonal(whole[:rows], group["ns_steps"])
        pieces = list(whole.split(one.each))
    works, results = [], [one.empty() for one in dealt]
    for owner, result in enumerate(results):
        works.append(
            dist.scatter(
                result, pieces if owner == rank else None, group=among, group_src=owner, async_op=True
            )
        )
    for work in works:
        work.wait()
    for one, result in zip(dealt, results, strict=True):
        _change(one.parameter, result[: len(one.update)].to(one.update.device).float(), group)


def _orthogonal_shard(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """This rank's part of the matrix made orthogonal, in float32 and where the matrix is."""
    if not isinstance(matrix, DTensor):
        return orthogonal(matrix.bfloat16(), steps).float()
    mesh, placements = matrix.device_mesh, matrix.placements
    local = matrix.to_local()
    if matrix.ndim == 3 and all(p.is_replicate() or getattr(p, "dim", None) == 0 for p in placements):
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
