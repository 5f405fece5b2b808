"""Entropies of the distributions that tokens are drawn from, beside the tokens' logprobs.

With logits z / T, log normaliser n and probabilities p, the entropy is H = n - sum(p z / T), and its
gradient with regard to z is -p (log p + H) / T. As in `head.py`, no more than a chunk of logits is in memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cairn.trainer.scoring.head import (
    IN_PLACE,
    Head,
    compile_rows,
    gradients_in_chunks,
    same_results,
    scored_in_chunks,
)

LEAST_LOGIT = -1e30
"""What a logit of minus infinity counts as: 0 times infinity is no number."""


def _score(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    """Of logits [L, V]: log normalisers, logprobs of the wanted tokens and entropies, float32 [L] each."""
    logits = (logits.float() / temperature).clamp(min=LEAST_LOGIT)
    normalisers = logits.logsumexp(-1)
    logprobs = logits.gather(-1, wanted[:, None])[:, 0] - normalisers
    mean = ((logits - normalisers[:, None]).exp() * logits).sum(-1)
    return normalisers, logprobs, normalisers - mean


def _differentiate(
    logits: torch.Tensor,
    normalisers: torch.Tensor,
    entropies: torch.Tensor,
    wanted: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits, from the gradients of logprobs and entropies (float32 [L] each)."""
    logprobs = (logits.float() / temperature).clamp(min=LEAST_LOGIT) - normalisers[:, None]
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted[:, None]
    of_all = of_logprobs[:, None] + of_entropies[:, None] * (logprobs + entropies[:, None])
    gradient = is_wanted.float() * of_logprobs[:, None] - logprobs.exp() * of_all
    return (gradient / temperature).to(dtype)


class EntropyPasses:
    """`_score` and `_differentiate`; fused: each compiled to as few kernels as torch.compile makes of it."""

    def __init__(self, *, fused: bool):
        self.score: Callable[..., tuple[torch.Tensor, ...]] = compile_rows(_score) if fused else _score
        self.differentiate: Callable[..., torch.Tensor] = (
            compile_rows(_differentiate) if fused else _differentiate
        )


PLAIN = EntropyPasses(fused=False)


def logprobs_and_entropies(
    head: Head,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Like `Head.logprobs`, with entropies (nats) beside the logprobs: float32 [2, L]."""
    rows = max(head.chunk_logits // len(weight), 1)
    passes = PLAIN if head.passes is IN_PLACE else _tried(weight.device, len(weight))
    return torch.stack(_InChunks.apply(hidden, weight, bias, tokens, temperature, rows, head, passes))


def of_logits(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """The same of logits [L, V] that are there already."""
    _, logprobs, entropies = _score(logits, tokens, temperature)
    return torch.stack([logprobs, entropies])


@functools.cache
def _tried(device: torch.device, vocabulary: int) -> EntropyPasses:
    """Compiled passes if they can be compiled and compute what `PLAIN` does, else that."""

    def compute(one: EntropyPasses, logits: torch.Tensor, wanted: torch.Tensor) -> list[torch.Tensor]:
        normalisers, logprobs, entropies = one.score(logits, wanted, 0.7)
        columns = (normalisers, entropies, wanted, logprobs, entropies)
        return [normalisers, logprobs, entropies, one.differentiate(logits, *columns, 0.7, torch.float32)]

    return same_results(
        EntropyPasses(fused=True), PLAIN, compute, device, vocabulary, "the passes for entropies"
    )


class _InChunks(torch.autograd.Function):
    """`logprobs_and_entropies`; a single chunk's logits are kept for the backward pass on a GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
        rows: int,
        head: Head,
        passes: EntropyPasses,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (normalisers, logprobs, entropies), kept = scored_in_chunks(
            *(head, hidden, weight, bias, tokens, temperature),
            rows=rows,
            score=passes.score,
            keep=passes is not PLAIN,
        )
        ctx.save_for_backward(hidden, weight, bias, tokens, normalisers, entropies, kept)
        ctx.temperature, ctx.rows, ctx.head, ctx.passes = temperature, rows, head, passes
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        ctx: Any, of_logprobs: torch.Tensor, of_entropies: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, tokens, normalisers, entropies, kept = ctx.saved_tensors
        passes: EntropyPasses = ctx.passes

        def differentiate(logits: torch.Tensor, dtype: torch.dtype, *columns: torch.Tensor) -> torch.Tensor:
            return passes.differentiate(logits, *columns, ctx.temperature, dtype)

        columns = (normalisers, entropies, tokens, of_logprobs, of_entropies)
        of_all = gradients_in_chunks(
            ctx.head, hidden, weight, bias, columns, rows=ctx.rows, kept=kept, differentiate=differentiate
        )
        return *of_all, None, None, None, None, None
