"""AdamW whose moments are kept in eight bits."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

BLOCK = 256
"""Neighbouring values of a row that share a scale."""
FEWEST = 4096
"""Elements of a weight whose moments are quantised; smaller weights' and vectors' moments are float32."""
PIECE = 1 << 24
"""Elements that are float32 at a time; a whole row if it has more."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with moments in eight bits (Dettmers et al. 2022).

    A moment is a uint8 code for each element and a float32 scale, the largest magnitude, for each block of up
    to 256 neighbours in a row. The code is the number of the nearest of 256 values, which lie closer together
    near 0. No block goes across rows, and ranks hold whole rows, so state does not depend on the number of
    ranks. An update uses the moments before they are rounded.

    Unlike in the paper, a second moment above 0 never becomes 0: the first moment would be divided by eps.

    State: `step`, `exp_avg` and `exp_avg_sq` as in AdamW, and `exp_avg_scale` and `exp_avg_sq_scale`
    [..., ceil(columns / 256)] of those in eight bits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        """`betas`: decay rates of the moments, from 0 to below 1."""
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas}: both must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Change the weights that have a gradient."""
        assert closure is None, "AdamW8bit evaluates nothing itself"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(_first_state(parameter))
                state["step"] += 1
                names = [name for name in state if name != "step"]
                for weight, gradient, *moments in _pieces(
                    [parameter, parameter.grad, *(state[name] for name in names)]
                ):
                    _change(weight, gradient, dict(zip(names, moments, strict=True)), state["step"], group)


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether its moments are kept in eight bits; the same on all ranks."""
    return parameter.ndim > 1 and parameter.numel() >= FEWEST


def _first_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    state = {"step": torch.zeros((), device=parameter.device)}
    for name in ("exp_avg", "exp_avg_sq"):
        if is_quantised(parameter):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{name}_scale"] = _blank_scales(parameter)
        else:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
    return state


def _blank_scales(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for each block of a weight, in the shards of its rows."""
    blocks = -(-parameter.shape[-1] // BLOCK)
    local = _local(parameter)
    scales = torch.zeros((*local.shape[:-1], blocks), device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    assert not any(p.is_shard(parameter.ndim - 1) for p in parameter.placements), "ranks hold whole rows"
    shape = torch.Size((*parameter.shape[:-1], blocks))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=strides
    )


def _pieces(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of all of them, some rows at a time; views of this rank's shards."""
    local = [_local(tensor) for tensor in tensors]
    weight = local[0]
    if not weight.ndim or not weight.numel():
        return iter([tuple(local)] if weight.numel() else [])
    rows = max(PIECE // (weight.numel() // len(weight)), 1)
    return zip(*(tensor.split(rows) for tensor in local), strict=True)


def _change(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: dict[str, torch.Tensor],
    step: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Change `weight` and `moments` in place."""
    of_mean, of_square = group["betas"]
    gradient = gradient.float()
    mean, square = (_values(moments, name) for name in ("exp_avg", "exp_avg_sq"))
    mean.lerp_(gradient, 1 - of_mean)
    square.mul_(of_square).addcmul_(gradient, gradient, value=1 - of_square)
    # The corrections are tensors, so that nothing is read from a GPU.
    root = (square / (1 - of_square**step)).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_((mean / (1 - of_mean**step)).div_(root), alpha=group["lr"])
    _keep(moments, "exp_avg", mean)
    _keep(moments, "exp_avg_sq", square)


def _values(moments: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A moment in float32; if it is kept so, what is kept itself."""
    if f"{name}_scale" not in moments:
        return moments[name]
    return dequantised(moments[name], moments[f"{name}_scale"], signed=name == "exp_avg")


def _keep(moments: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    if f"{name}_scale" in moments:
        codes, scales = quantised(values, signed=name == "exp_avg")
        moments[name].copy_(codes)
        moments[f"{name}_scale"].copy_(scales)


def quantised(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 in the shape of `values` (float32 [..., n]), and scales, float32 [..., ceil(n / 256)].

    Args:
        signed: whether values may be below 0; otherwise only 0 gets the code of 0.
    """
    columns = values.shape[-1]
    blocks = pad(values, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    numbers = _numbers(signed, values.device)
    codes = torch.bucketize(shares, (numbers[1:] + numbers[:-1]) / 2, out_int32=True)
    if not signed:
        codes = codes.maximum((blocks > 0).int())
    return codes.to(torch.uint8).flatten(-2)[..., :columns], scales


def dequantised(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The numbers, float32, that codes and scales stand for."""
    shares = _numbers(signed, codes.device)[codes.int()]
    return shares.mul_(scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]])


@cache
def _numbers(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 numbers of dynamic quantisation in ascending order (Dettmers 2016): 0, 1, and others below.

    Seven decades below 1, each with twice as many numbers, at equal distances, as the one below it; with
    signs, half as many on each side.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        width = 0.9 / count
        positive = [(0.1 + width * (index + 0.5)) * 10.0 ** (decade - 6) for index in range(count)]
        numbers += positive + ([-number for number in positive] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
