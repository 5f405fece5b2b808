"""Logprobs of tokens from hidden states and output embeddings, a chunk of logits at a time.

On a GPU each chunk is one matrix product and one fused pass over its result, in the forward pass as in the
backward pass. The passes are plain PyTorch code that torch.compile fuses, so that no package of kernels has
to keep up with PyTorch's and vLLM's versions. Where it can't compile, each operation runs on its own.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

CHUNK_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Largest number of logits in memory at a time, by the kind of device: 256 MiB and 2 GiB of float32."""
TRIAL_ROWS = 64
"""Rows of logits on which compiled passes are tried."""

Score = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
Differentiate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, torch.dtype], torch.Tensor
]


@dataclass(frozen=True)
class Passes:
    """What is computed from a chunk of logits [L, V], of any data type.

    score: from logits, wanted tokens (int64 [L]) and temperature, the logarithms of the normalisers and the
    logprobs of the wanted tokens, both float32 [L].
    differentiate: from logits, log normalisers, wanted tokens, the gradient of the logprobs, temperature and
    a data type, the gradient of the logits in that type.
    Either may change the logits in place.
    """

    score: Score
    differentiate: Differentiate


def _score(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    logits = logits.float().div_(temperature)
    normalisers = logits.logsumexp(-1)
    return normalisers, logits.gather(-1, wanted[:, None])[:, 0] - normalisers


def _differentiate(
    logits: torch.Tensor,
    normalisers: torch.Tensor,
    wanted: torch.Tensor,
    scale: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    of_logits = logits.float().div_(temperature)
    of_logits.sub_(normalisers[:, None]).exp_().neg_()
    of_logits[torch.arange(len(wanted), device=wanted.device), wanted] += 1
    return of_logits.mul_((scale / temperature)[:, None]).to(dtype)


IN_PLACE = Passes(_score, _differentiate)
"""Operation by operation, without a second chunk in memory."""


def _score_purely(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    logits = logits.float() / temperature
    normalisers = logits.logsumexp(-1)
    return normalisers, logits.gather(-1, wanted[:, None])[:, 0] - normalisers


def _differentiate_purely(
    logits: torch.Tensor,
    normalisers: torch.Tensor,
    wanted: torch.Tensor,
    scale: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    probabilities = (logits.float() / temperature - normalisers[:, None]).exp()
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted[:, None]
    return ((is_wanted.float() - probabilities) * (scale / temperature)[:, None]).to(dtype)


PURE = Passes(_score_purely, _differentiate_purely)
"""What is compiled: no operation changes its arguments, so that all can be fused."""


def compile_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors with equally many rows, compiled once for any number of them.

    Inductor measures no kernels, since the choice among them could differ from one process to the next and
    with it the bits of a resumed run.
    """
    fused = torch.compile(function, options={"deterministic": True})

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)  # pyright: ignore[reportPrivateUsage] (documented)
        return fused(*arguments)

    return call


def compiled() -> Passes:
    """`PURE`, each pass compiled to as few kernels as torch.compile makes of it."""
    return Passes(compile_rows(PURE.score), compile_rows(PURE.differentiate))


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
        rows = max(self.chunk_logits // len(weight), 1)
        return _InChunks.apply(hidden, weight, bias, tokens, temperature, rows, self)


def of_logits(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """The logprob of each token under softmax(logits / temperature), float32 [L], of logits [L, V]."""
    logits = logits.float() / temperature if temperature != 1.0 else logits.float()
    return -F.cross_entropy(logits, tokens, reduction="none")


def tried(passes: Passes, device: torch.device, vocabulary: int) -> Passes:
    """`passes` if they can be compiled and compute what `IN_PLACE` does, else those."""

    def compute(one: Passes, logits: torch.Tensor, wanted: torch.Tensor) -> list[torch.Tensor]:
        normalisers, logprobs = one.score(logits.clone(), wanted, 0.7)
        gradient = one.differentiate(logits.clone(), normalisers, wanted, logprobs, 0.7, torch.float32)
        return [normalisers, logprobs, gradient]

    return same_results(passes, IN_PLACE, compute, device, vocabulary, "the head's passes")


P = TypeVar("P")


def same_results(
    fused: P,
    plain: P,
    compute: Callable[[P, torch.Tensor, torch.Tensor], list[torch.Tensor]],
    device: torch.device,
    vocabulary: int,
    what: str,
) -> P:
    """`fused` if it can be compiled and computes what `plain` does, else `plain`, with a warning.

    Args:
        compute: all that one of them computes from logits (float32 [TRIAL_ROWS, V]) and wanted tokens.
        what: they are, for the warning.
    """
    draw = torch.Generator(device).manual_seed(0)
    logits = torch.randn(TRIAL_ROWS, vocabulary, device=device, generator=draw)
    wanted = torch.arange(TRIAL_ROWS, device=device) % vocabulary
    try:
        results = [compute(one, logits, wanted) for one in (fused, plain)]
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    except Exception as error:  # a compiler may fail in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("%s are not fused, which is slower: %s", what, reason[:300])
        return plain
    return fused


class _InChunks(torch.autograd.Function):
    """`Head.logprobs` with no more than `rows` rows of logits at a time.

    A single chunk's logits are kept for the backward pass on a GPU, where the product costs more than memory.
    """

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
    ) -> torch.Tensor:
        (normalisers, logprobs), kept = scored_in_chunks(
            *(head, hidden, weight, bias, tokens, temperature),
            rows=rows,
            score=head.passes.score,
            keep=head.passes is not IN_PLACE,
        )
        ctx.save_for_backward(hidden, weight, bias, tokens, normalisers, kept)
        ctx.temperature, ctx.rows, ctx.head = temperature, rows, head
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, tokens, normalisers, kept = ctx.saved_tensors
        head: Head = ctx.head

        def differentiate(logits: torch.Tensor, dtype: torch.dtype, *columns: torch.Tensor) -> torch.Tensor:
            wanted, normaliser, scale = columns
            return head.passes.differentiate(logits, normaliser, wanted, scale, ctx.temperature, dtype)

        columns = (tokens, normalisers, gradient)
        of_hidden, of_weight, of_bias = gradients_in_chunks(
            head, hidden, weight, bias, columns, rows=ctx.rows, kept=kept, differentiate=differentiate
        )
        return of_hidden, of_weight, of_bias, None, None, None, None


def scored_in_chunks(
    head: Head,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float,
    *,
    rows: int,
    score: Callable[..., tuple[torch.Tensor, ...]],
    keep: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The results of `score`, with no more than `rows` rows of logits at a time.

    Args:
        score: from a chunk's logits, its wanted tokens and the temperature, values of each row.
        keep: whether to keep the logits where one chunk is all.

    Returns:
        The values of all rows, [L] each; the logits, if they were kept.
    """
    kept = None
    found: list[tuple[torch.Tensor, ...]] = []
    for piece, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True):
        logits = head.logits(piece, weight, bias)
        if keep and len(hidden) <= rows:
            kept = logits
        found.append(score(logits, wanted, temperature))
    return [torch.cat(parts) for parts in zip(*found, strict=True)], kept


def gradients_in_chunks(
    head: Head,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: Sequence[torch.Tensor],
    *,
    rows: int,
    kept: torch.Tensor | None,
    differentiate: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of hidden states, weights and biases, with no more than `rows` rows of logits at a time.

    Args:
        columns: values of each row, [L] each.
        kept: the logits of the only chunk, if they were kept.
        differentiate: from a chunk's logits, a data type and the chunk's part of each column, the gradient of
            the logits in that type.
    """
    of_hidden = torch.empty_like(hidden)
    of_weight = torch.zeros_like(weight, dtype=torch.float32)
    of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
    # Sums over a chunk's rows are those of float32 gradients where a bias needs them.
    dtype = weight.dtype if bias is None else torch.float32
    for piece, of_piece, *values in zip(
        *(column.split(rows) for column in (hidden, of_hidden, *columns)), strict=True
    ):
        logits = head.logits(piece, weight, bias) if kept is None else kept
        of_chunk = differentiate(logits, dtype, *values)
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
    return of_hidden, of_weight.to(weight.dtype), of_bias
