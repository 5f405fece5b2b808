"""Context parallelism: ranks share the tokens of each row, and attention still sees whole samples.

Every rank of a context axis computes the layers of its part of each row. For attention the ranks exchange
what they have, so that each gets some of the heads, of all tokens; afterwards they exchange the results back
(Ulysses, Jacobs et al. 2023). What is computed in between, with kernels or with masks, is attention as on one
rank, so that packed samples stay apart in the same way.

Numbers of tokens, such as logprobs, are put together again, so that every rank has those of whole rows, and
computes the same loss from them. The backward pass then begins on each rank with its own tokens, and the sum
over all ranks is the gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cairn.run.batches import EXPERTS, UNKNOWN_EXPERT
from cairn.trainer.attention.kernels import (
    NotServed,
    Result,
    by_blocks,
    by_samples,
    refuse_arguments,
    torch_varlen,
)
from cairn.trainer.group import NO_AXIS, Axis
from cairn.trainer.packing import MicroBatch

NAMES = {"dense": "cairn_context_dense", "varlen": "cairn_context_varlen", "flex": "cairn_context_flex"}
"""What attention is called among transformers' attention functions, by the kind that the ranks compute."""


@dataclass(frozen=True)
class RowsPart:
    """What a rank's layers compute of a micro-batch with R rows of T tokens and L learned ones.

    input_ids, position_ids: int64 [R, S], of the tokens that are here. places: int64 [l], where the hidden
    states are that predict those of the learned tokens which fall to this rank, in the flattened [R, S]. own:
    int64 [l], which of the L these are; None: all. axes: along which the other ranks have the others.
    experts: int16 [R, S, layers, experts of a token], those that the server has chosen; None: they
    are unknown, or are not replayed.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    places: torch.Tensor
    own: torch.Tensor | None
    learned: int
    axes: tuple[Axis, ...] = ()
    experts: torch.Tensor | None = None

    def of_own(self, values: torch.Tensor) -> torch.Tensor:
        """Of values of the learned tokens, [L], those that fall to this rank, [l]."""
        return values if self.own is None else values[self.own]

    def together(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all learned tokens, [..., L], from each rank's own, [..., l]; all ranks call it."""
        if self.own is None:
            return values
        return _Together.apply(values, self.own, self.learned, self.axes)


def part_of_rows(micro: MicroBatch, axis: Axis, tensor: Axis = NO_AXIS, *, replays: bool = False) -> RowsPart:
    """This rank's part of a micro-batch's rows, which is all of them on an axis of one rank.

    On a GPU the number of own tokens is waited for.

    Args:
        tensor: ranks whose layers compute all of each row together. Each has its part of the learned tokens.
        replays: whether the layers replay the experts that the server has chosen.
    """
    experts = micro.columns.get(EXPERTS) if replays and micro.tokens else None
    if axis.size == 1:
        places = micro.learned - 1
        part = RowsPart(micro.input_ids, micro.position_ids, places, None, len(micro.learned), (), experts)
        return part if tensor.size == 1 else _divided(part, tensor)
    micro = widened(micro, axis.size)
    width = micro.input_ids.shape[1]
    here = width // axis.size
    first = axis.rank * here
    predicting = micro.learned - 1
    row, column = predicting // width, predicting % width
    own = ((column >= first) & (column < first + here)).nonzero()[:, 0]
    part = RowsPart(
        micro.input_ids[:, first : first + here].contiguous(),
        micro.position_ids[:, first : first + here].contiguous(),
        (row * here + column - first)[own],
        own,
        len(micro.learned),
        (axis,),
        None if experts is None else _part_of_columns(experts, first, here),
    )
    return part if tensor.size == 1 else _divided(part, tensor)


def _divided(part: RowsPart, axis: Axis) -> RowsPart:
    """The same tokens, but equally many of the learned ones for each rank of an axis."""
    count = len(part.places)
    first, end = (count * number // axis.size for number in (axis.rank, axis.rank + 1))
    own = torch.arange(count, device=part.places.device) if part.own is None else part.own
    return replace(part, places=part.places[first:end], own=own[first:end], axes=(*part.axes, axis))


def _part_of_columns(values: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Of [R, T, layers, n], so many tokens of each row from the first on; unknown experts beyond its end."""
    part = values[:, first : first + count]
    missing = count - part.shape[1]
    return F.pad(part, (0, 0, 0, 0, 0, missing), value=UNKNOWN_EXPERT).contiguous()


def widened(micro: MicroBatch, multiple: int) -> MicroBatch:
    """With rows of a multiple of so many tokens, for a forward pass alone: without columns and units.

    What is added to a row is a sample of its own.
    """
    rows, tokens = micro.input_ids.shape
    missing = -tokens % multiple
    if not missing:
        return micro
    width, device = tokens + missing, micro.input_ids.device
    added = torch.arange(missing, device=device).expand(rows, -1)
    starts = micro.bounds[:-1]
    starts = torch.cat(
        [
            starts + starts // tokens * missing,
            torch.arange(rows + 1, device=device, dtype=starts.dtype) * width + tokens,
        ]
    )
    starts[-1] = rows * width
    return replace(
        micro,
        input_ids=F.pad(micro.input_ids, (0, missing)),
        position_ids=torch.cat([micro.position_ids, added], 1),
        loss_mask=F.pad(micro.loss_mask, (0, missing)),
        is_token=F.pad(micro.is_token, (0, missing)),
        columns={},
        learned=micro.learned + micro.learned // tokens * missing,
        bounds=starts.sort().values,
        samples=micro.samples + rows,
        longest=max(micro.longest, missing),
        units=micro.units[:0],
    )


def gather_tokens(values: torch.Tensor, axis: Axis, tokens: int) -> torch.Tensor:
    """Values of all tokens of whole rows, [..., T, n], from those of each rank's, [..., S, n]."""
    return _Gathered.apply(values, axis)[..., :tokens, :]


def masks_of_rows(micro: MicroBatch, windows: Sequence[int | None]) -> dict[int, torch.Tensor]:
    """Which tokens each token sees: bool [R, 1, T, T], by the window (0: none).

    It sees those before it in its own sample, and itself.
    """
    sample = (micro.position_ids == 0).cumsum(1)
    places = torch.arange(sample.shape[1], device=sample.device)
    before = places[:, None] - places
    seen = (sample[:, :, None] == sample[:, None]) & (before >= 0)
    of_window = {window: seen if window is None else seen & (before < window) for window in windows}
    return {window or 0: mask[:, None] for window, mask in of_window.items()}


def by_masks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    row_masks: dict[int, torch.Tensor] | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> Result:
    """transformers' attention function that computes with masks of all pairs of tokens."""
    refuse_arguments(
        attention_mask=attention_mask, dropout=dropout, is_causal=is_causal, position_bias=position_bias
    )
    if row_masks is None or (sliding_window or 0) not in row_masks:
        raise NotServed(f"the model hands its layers no mask for a window of {sliding_window} tokens")
    mask = row_masks[sliding_window or 0]
    shared = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(shared, 1) for states in (key, value))
    if softcap is None and s_aux is None:
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return result.transpose(1, 2), None
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if s_aux is not None:
        sinks = s_aux.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    shares = scores.softmax(-1)[..., : value.shape[2]].to(value.dtype)
    return (shares @ value).transpose(1, 2), None


def exchanged(attend: Callable[..., Result]) -> Callable[..., Result]:
    """transformers' attention function that has whole rows attended to, a part of the heads on each rank.

    Args:
        attend: such a function for whole rows and a part of the heads.
    """

    def attend_together(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        context_axis: Axis | None = None,
        s_aux: torch.Tensor | None = None,
        **more: Any,
    ) -> Result:
        if context_axis is None:
            raise NotServed("the model does not hand its layers which ranks have the other tokens")
        size, heads, key_heads = context_axis.size, query.shape[1], key.shape[1]
        if heads % size:
            raise NotServed(f"a layer has {heads} heads, which {size} ranks can't share equally")
        if key_heads % size:  # each rank needs the keys and values of its own queries; some need the same
            repeats = size // key_heads if size % key_heads == 0 else heads // key_heads
            key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
        if s_aux is not None:
            s_aux = s_aux.unflatten(0, (size, -1))[context_axis.rank]
        whole = _to_heads([query, key, value], context_axis)
        result, _ = attend(module, *whole, attention_mask, s_aux=s_aux, **more)
        return _to_tokens(result, context_axis), None

    return attend_together


def _to_heads(states: Sequence[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """From [R, heads, S, d] of own tokens to [R, heads / ranks, T, d] of own heads, in one exchange."""
    size = axis.size
    by_rank = [one.unflatten(1, (size, -1)).movedim(1, 0) for one in states]
    sent = torch.cat([one.reshape(size, -1) for one in by_rank], 1)
    lengths = [one[0].numel() for one in by_rank]
    received: torch.Tensor = _Exchange.apply(sent, axis)
    found = [
        piece.view(one.shape) for piece, one in zip(received.split(lengths, 1), by_rank, strict=True)
    ]  # [ranks, R, heads / ranks, S, d]
    return [one.permute(1, 2, 0, 3, 4).flatten(2, 3) for one in found]


def _to_tokens(result: torch.Tensor, axis: Axis) -> torch.Tensor:
    """From [R, T, heads / ranks, d] of own heads to [R, S, heads, d] of own tokens."""
    sent = result.unflatten(1, (axis.size, -1)).movedim(1, 0)  # [ranks, R, S, heads / ranks, d]
    received: torch.Tensor = _Exchange.apply(sent.contiguous(), axis)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()  # as layers expect of transformers' own


class _Exchange(torch.autograd.Function):
    """The ranks' n-th pieces (of the first dimension) go to rank n, whose gradients go back."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=axis.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_received: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        of_sent = torch.empty_like(of_received, memory_format=torch.contiguous_format)
        dist.all_to_all_single(of_sent, of_received.contiguous(), group=ctx.axis.group)
        return of_sent, None


class _Together(torch.autograd.Function):
    """`RowsPart.together`; every rank computes the same loss from the result, so none is asked for its
    gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, own: torch.Tensor, length: int, axes: Sequence[Axis]
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(*values.shape[:-1], length).index_copy_(-1, own, values)
        for axis in axes:
            dist.all_reduce(whole, group=axis.group)  # a sum of which all terms but one are 0
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        (own,) = ctx.saved_tensors
        return of_whole.index_select(-1, own), None, None, None


class _Gathered(torch.autograd.Function):
    """The second last dimension of all ranks, one after the other; gradients as in `_Together`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis, ctx.length = axis, values.shape[-2]
        pieces = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(axis.size)]
        dist.all_gather(pieces, values.contiguous(), group=axis.group)
        return torch.cat(pieces, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_whole: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] (what the decorator returns)
        return of_whole.narrow(-2, ctx.axis.rank * ctx.length, ctx.length), None


ALL_ATTENTION_FUNCTIONS.register(NAMES["dense"], exchanged(by_masks))
ALL_ATTENTION_FUNCTIONS.register(NAMES["varlen"], exchanged(by_samples(torch_varlen)))
ALL_ATTENTION_FUNCTIONS.register(NAMES["flex"], exchanged(by_blocks))
