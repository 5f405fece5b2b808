"""A check of attention kernels as a model's layers call them, forward and backward, on the device at hand.

The check of the model (`self_check`) runs forward passes of two short samples. This one is given what the
layers asked of the kernel meanwhile. For samples that share rows, span blocks and are longer than windows it
compares results and gradients with those of each sample alone, computed in float32 from all pairs of tokens.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cairn.run.batches import Sample
from cairn.trainer.attention.choice import Attention
from cairn.trainer.attention.kernels import KernelCall
from cairn.trainer.packing import MicroBatch, fill_rows

LENGTHS = ((150, 41), (1, 190))
"""Tokens of the samples of each row."""
WINDOW = 33
"""Window of the check for layers that have one, whatever its length."""
TOLERANCE = 0.02
"""Largest error of a result, relative to its norm: several times what rounding to bfloat16 makes."""


def kernel_problem(attention: Attention, call: KernelCall, device: torch.device) -> str | None:
    """What is wrong with the kernel's results or gradients; None if nothing is.

    Changes no random state.
    """
    window = WINDOW if call.window else None
    ones = [[Sample(np.zeros(n, np.int32), np.ones(n, bool)) for n in row] for row in LENGTHS]
    micro = fill_rows(ones).to(device)
    rows, tokens = micro.input_ids.shape
    draw = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device, call.dtype)

    inputs = {
        "queries": made(rows, call.heads, tokens, call.size),
        "keys": made(rows, call.key_heads, tokens, call.size),
        "values": made(rows, call.key_heads, tokens, call.value_size),
    }
    if call.has_sinks:
        inputs["sinks"] = made(call.heads)
    weights = made(rows, tokens, call.heads, call.value_size).float()
    ours = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    exact = {name: tensor.float().requires_grad_() for name, tensor in inputs.items()}
    with torch.enable_grad():
        found, _ = ALL_ATTENTION_FUNCTIONS[attention.name](
            torch.nn.Module(),
            *(ours["queries"], ours["keys"], ours["values"], None),
            scaling=call.scale,
            sliding_window=window,
            softcap=call.softcap,
            s_aux=ours.get("sinks"),
            **replace(attention, windows=(None, window)).arguments(micro),
        )
        expected = _one_by_one(exact, call, window, micro)
        gradients = [
            torch.autograd.grad((result.float() * weights).sum(), list(of.values()))
            for result, of in ((found, ours), (expected, exact))
        ]
    names = ["the result", *(f"the gradient of {name}" for name in inputs)]
    pairs = zip(names, (found, *gradients[0]), (expected, *gradients[1]), strict=True)
    for name, tensor, right in pairs:
        error = ((tensor.detach().float() - right).norm() / right.norm()).item()
        if not error <= TOLERANCE:
            return f"{attention.kind} attention with {call} errs by {error:.1e} in {name}"
    return None


def _one_by_one(
    states: dict[str, torch.Tensor], call: KernelCall, window: int | None, micro: MicroBatch
) -> torch.Tensor:
    """Attention of each sample alone, float32 [rows, tokens, heads, size of values]."""
    shared = call.heads // call.key_heads
    queries = states["queries"].transpose(1, 2).flatten(0, 1)
    keys, values = (
        states[name].transpose(1, 2).flatten(0, 1).repeat_interleave(shared, 1) for name in ("keys", "values")
    )
    scale = call.scale if call.scale is not None else 1 / math.sqrt(call.size)
    results = []
    bounds = micro.bounds.tolist()
    for start, end in itertools.pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", queries[start:end], keys[start:end]) * scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        places = torch.arange(end - start, device=scores.device)
        hidden = places > places[:, None]
        if window is not None:
            hidden |= places <= places[:, None] - window
        scores = scores.masked_fill(hidden, -math.inf)
        if "sinks" in states:
            sinks = states["sinks"][:, None, None].expand(-1, end - start, 1)
            shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", shares, values[start:end]))
    return torch.cat(results).unflatten(0, tuple(micro.input_ids.shape))
