"""Logprobs of tokens from hidden states and output embeddings, a chunk of logits at a time.

On a GPU each chunk is one matrix product and one fused pass over its result (`passes.py`), in the forward
pass as in the backward pass.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from cairn.trainer.scoring.passes import IN_PLACE, WITH_ENTROPIES, Passes, compiled, tried

CHUNK_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Largest number of logits in memory at a time, by the kind of device: 256 MiB and 2 GiB of float32."""


@dataclass(frozen=True)
class Head:
    """How logits are computed on a device.

    chunk_logits: largest number of logits in memory at a time. in_float32: whether logits are float32 also if
    hidden states and weights are not: bfloat16 rounds a logit of 20 by up to 0.06, and every logprob with it.
    """

    chunk_logits: int
    in_float32: bool
    passes: Passes = IN_PLACE

    @classmethod
    def on(cls, device: torch.device, vocabulary: int, *, in_float32: bool) -> "Head":
        """The head that suits the device."""
        if device.type == "cpu":
            return cls(CHUNK_LOGITS["cpu"], in_float32)
        return cls(CHUNK_LOGITS["cuda"], in_float32, tried(compiled(), device, vocabulary))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[L, V] of hidden states [L, H], weights [V, H] and, if there are any, biases [V]."""
        if not self.in_float32 or weight.dtype == torch.float32:
            return F.linear(hidden, weight, bias)
        if weight.device.type == "cpu":
            return F.linear(hidden.float(), weight.float(), bias.float() if bias is not None else None)
        # As vLLM does it for a head in float32: the product of rounded numbers, its sums in float32.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)

    def logprobs(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """The logprob of each token under softmax((hidden @ weight.T + bias) / temperature), float32 [L].

        A larger number of logits than `chunk_logits` is computed in chunks, and again in the backward pass.

        Args:
            hidden: [L, H].
            weight: [V, H]; `bias`, if there is one: [V].
            tokens: int64 [L].
        """
        is_one_chunk = len(hidden) * len(weight) <= self.chunk_logits
        if is_one_chunk and self.passes is IN_PLACE and weight.device.type == "cpu":
            return of_logits(self.logits(hidden, weight, bias), tokens, temperature)
        return self._scored(self.passes, hidden, weight, bias, tokens, temperature)[0]

    def logprobs_and_entropies(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """As `logprobs`, with entropies (nats) beside the logprobs: float32 [2, L]."""
        is_plain = self.passes is IN_PLACE
        passes = WITH_ENTROPIES if is_plain else _with_entropies(weight.device, len(weight))
        return torch.stack(self._scored(passes, hidden, weight, bias, tokens, temperature))

    def _scored(
        self,
        passes: Passes,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, ...]:
        """The values of each row that `passes` compute, float32 [L] each."""
        rows = max(self.chunk_logits // len(weight), 1)
        return _InChunks.apply(hidden, weight, bias, tokens, temperature, rows, self, passes)


@functools.cache
def _with_entropies(device: torch.device, vocabulary: int) -> Passes:
    what = "the passes for entropies"
    return tried(compiled(WITH_ENTROPIES), device, vocabulary, WITH_ENTROPIES, what)


def of_logits(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logprob of each token under softmax(logits / temperature), float32 [L], of logits [L, V]."""
    logits = logits.float() / temperature if temperature != 1.0 else logits.float()
    return -F.cross_entropy(logits, tokens, reduction="none")


def both_of_logits(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logprobs and entropies, float32 [2, L], of logits [L, V]."""
    _, logprobs, entropies = WITH_ENTROPIES.score(logits, tokens, temperature)
    return torch.stack([logprobs, entropies])


class _InChunks(torch.autograd.Function):
    """What `Head` computes, with no more than `rows` rows of logits at a time."""

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
        passes: Passes,
    ) -> tuple[torch.Tensor, ...]:
        kept = None
        found: list[tuple[torch.Tensor, ...]] = []
        for piece, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True):
            logits = head.logits(piece, weight, bias)
            if passes.keeps_logits and len(hidden) <= rows:
                kept = logits
            found.append(passes.score(logits, wanted, temperature))
        normalisers, *values = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, kept, normalisers, tokens, *values[1:])
        ctx.temperature, ctx.rows, ctx.head, ctx.passes = temperature, rows, head, passes
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, kept, *columns = ctx.saved_tensors
        head: Head = ctx.head
        passes: Passes = ctx.passes
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        # Sums over a chunk's rows are those of float32 gradients where a bias needs them.
        dtype = weight.dtype if bias is None else torch.float32
        by_row = (hidden, of_hidden, *columns, *gradients)
        for piece, of_piece, *values in zip(*(column.split(ctx.rows) for column in by_row), strict=True):
            logits = head.logits(piece, weight, bias) if kept is None else kept
            of_chunk = passes.differentiate(logits, *values, ctx.temperature, dtype)
            if of_bias is not None:
                of_bias += of_chunk.sum(0)
            of_chunk = of_chunk.to(weight.dtype)
            torch.mm(of_chunk, weight, out=of_piece)
            if of_weight.dtype == weight.dtype:
                of_weight.addmm_(of_chunk.T, piece)
            else:
                of_weight += of_chunk.T @ piece
        if bias is not None and of_bias is not None:
            of_bias = of_bias.to(bias.dtype)
        return of_hidden, of_weight.to(weight.dtype), of_bias, None, None, None, None, None
