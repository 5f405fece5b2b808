"""Logprobs of the learned tokens under the current weights, without the logits of all tokens at once.

Only places whose next token is learned go through the output embeddings. If the model returns the logits of
its output embeddings unchanged, logprobs are computed from hidden states, chunk by chunk. A model that scales
or caps its logits (Cohere, Granite, Gemma 2) computes the logits of these places itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cairn.trainer.model import reshard
from cairn.trainer.packing import MicroBatch
from cairn.trainer.rows import BY_POSITIONS, Rows

CHUNK_LOGITS = 1 << 26
"""Largest number of logits in memory at a time: 256 MiB of float32."""


class Scorer:
    """Scores micro-batches with `model`, whose weights may change in between."""

    rows: Rows
    """How samples lie in the rows of micro-batches; `self_check.find_rows` finds out which way is right."""

    def __init__(self, model: PreTrainedModel, device: torch.device, chunk_logits: int = CHUNK_LOGITS):
        """Find out whether the model changes its logits; all ranks call it."""
        self.model = model
        self.rows = BY_POSITIONS
        self.chunk_logits = chunk_logits
        self.head = head = model.get_output_embeddings()
        self.is_plain = (
            isinstance(head, nn.Linear)
            and type(head).forward is nn.Linear.forward  # also of the subclass that FSDP2 makes
            and self._returns_them_as_they_are(head, device)
        )

    def logprobs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Logprobs of tokens 1 to T - 1, float32 [R, T - 1], and 0 for those that are not learned.

        Args:
            micro: on the model's device.
            temperature: logits are divided by it.
        """
        learned = micro.learned
        tokens = micro.input_ids.flatten()[learned]
        found: list[torch.Tensor] = []

        def select(head: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            found.append(inputs[0].flatten(0, -2)[learned - 1])
            return inputs[0][:, :0] if self.is_plain else found[0][None]

        def score(head: nn.Linear, inputs: tuple[torch.Tensor], none: torch.Tensor) -> torch.Tensor:
            return token_logprobs(
                found[0], head.weight, head.bias, tokens, temperature, chunk_logits=self.chunk_logits
            )

        hooks: list[RemovableHandle] = []
        if self.head is not None:
            hooks.append(self.head.register_forward_pre_hook(select))
            if self.is_plain:
                # Before FSDP2's hook, which takes the result for the begin of the backward pass.
                hooks.append(self.head.register_forward_hook(score, prepend=True))
        try:
            result = self._run(micro.input_ids, micro.position_ids)
        finally:
            for hook in hooks:
                hook.remove()
        if self.is_plain:
            values = result
        else:
            logits = result[0] if self.head is not None else result.flatten(0, 1)[learned - 1]
            values = _of_logits(logits, tokens, temperature)
        everywhere = values.new_zeros(micro.input_ids.numel()).index_copy(0, learned, values)
        return everywhere.view_as(micro.input_ids)[:, 1:]

    def _run(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        # Models tell samples apart by their positions only if they keep no cache.
        more = self.rows.arguments(self.model.config, position_ids)
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **more).logits

    @torch.no_grad()
    def _returns_them_as_they_are(self, head: nn.Linear, device: torch.device) -> bool:
        """Whether the model returns its output embeddings' logits unchanged; tried with made-up logits."""
        ours = torch.linspace(-100, 100, 2 * head.out_features, device=device).view(1, 2, -1)
        hook = head.register_forward_hook(lambda *_: ours)
        try:
            places = torch.arange(2, device=device)[None]
            logits = self._run(places, places)
        finally:
            hook.remove()
            reshard(self.model)
        return logits.shape == ours.shape and torch.equal(logits, ours)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> torch.Tensor:
    """The logprob of each token under softmax((hidden @ weight.T + bias) / temperature), float32 [L].

    Args:
        hidden: [L, H].
        weight: [V, H]; `bias`, if there is one: [V].
        tokens: int64 [L].
        chunk_logits: a larger number of logits is computed in chunks of this size, and again in the backward
            pass.
    """
    if len(hidden) * len(weight) <= chunk_logits:
        return _of_logits(F.linear(hidden, weight, bias), tokens, temperature)
    rows = max(chunk_logits // len(weight), 1)
    return _InChunks.apply(hidden, weight, bias, tokens, temperature, rows)


def _of_logits(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float() / temperature if temperature != 1.0 else logits.float()
    return -F.cross_entropy(logits, tokens, reduction="none")


class _InChunks(torch.autograd.Function):
    """`token_logprobs` with no more than `rows` rows of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
        rows: int,
    ) -> torch.Tensor:
        normalisers, logprobs = [], []
        for piece, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True):
            logits = F.linear(piece, weight, bias).float().div_(temperature)
            normalisers.append(logits.logsumexp(-1))
            logprobs.append(logits.gather(-1, wanted[:, None])[:, 0] - normalisers[-1])
        ctx.save_for_backward(hidden, weight, bias, tokens, torch.cat(normalisers))
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(logprobs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, tokens, normalisers = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        columns = (hidden, of_hidden, tokens, normalisers, gradient)
        for piece, of_piece, wanted, normaliser, scale in zip(
            *(column.split(ctx.rows) for column in columns), strict=True
        ):
            of_logits = F.linear(piece, weight, bias).float().div_(ctx.temperature)
            of_logits.sub_(normaliser[:, None]).exp_().neg_()
            of_logits[torch.arange(len(wanted), device=wanted.device), wanted] += 1
            of_logits.mul_((scale / ctx.temperature)[:, None])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            of_logits = of_logits.to(weight.dtype)
            torch.mm(of_logits, weight, out=of_piece)
            if of_weight.dtype == weight.dtype:
                of_weight.addmm_(of_logits.T, piece)
            else:
                of_weight += of_logits.T @ piece
        if bias is not None and of_bias is not None:
            of_bias = of_bias.to(bias.dtype)
        return of_hidden, of_weight.to(weight.dtype), of_bias, None, None, None
