"""Kernels of attention over samples laid end to end, as transformers' attention functions."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAMES = {"varlen": "cairn_varlen", "flex": "cairn_flex", "apart": "cairn_apart"}
"""What the kernels are called among transformers' attention functions. No function that makes masks has
such a name, so transformers makes none, and does not ask the device whether one is needed."""
BLOCK = 128
"""Tokens of a side of FlexAttention's blocks."""
Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float, int | None], torch.Tensor
]
"""Causal attention of samples laid end to end: queries [N, heads, d], keys and values [N, fewer heads, d],
bounds (int32 [samples + 1]), tokens of the longest sample, scale, and how many tokens each one sees including
itself, or None for all. Returns [N, heads, d]."""
Result = tuple[torch.Tensor, None]


class NotServed(Exception):
    """A layer asks for attention that the kernel does not compute."""


@dataclass(frozen=True)
class KernelCall:
    """What a layer asks of a kernel; two layers that ask the same are one call.

    heads, key_heads: of queries, and of keys and values. size, value_size: of the heads of queries and keys,
    and of values.
    """

    heads: int
    key_heads: int
    size: int
    value_size: int
    dtype: torch.dtype
    scale: float | None
    window: int | None
    softcap: float | None
    has_sinks: bool


_calls: set[KernelCall] | None = None


@contextmanager
def noted() -> Iterator[set[KernelCall]]:
    """All that layers ask of the kernels meanwhile."""
    global _calls
    _calls = calls = set()
    try:
        yield calls
    finally:
        _calls = None


def make_block_mask(bounds: torch.Tensor, tokens: int, window: int | None) -> BlockMask:
    """FlexAttention's mask for samples laid end to end: causal, within each sample and, if given, a window.

    The blocks that hold anything follow from where the samples begin, so no pair of tokens is looked at, and
    the device is not waited for.

    Args:
        bounds: int32 [samples + 1], of which the last is `tokens`.
    """
    count = -(-tokens // BLOCK)
    places = torch.arange(count * BLOCK, device=bounds.device, dtype=torch.int32)
    sample = torch.searchsorted(bounds, places, right=True).clamp_max(len(bounds) - 1) - 1
    first_seen = bounds[sample]
    if window is not None:
        first_seen = torch.maximum(first_seen, places - (window - 1))
    # Neither falls from one token to the next: a block sees what its first token does, and all its tokens see
    # what its last one does.
    by_first, by_last = first_seen[::BLOCK], first_seen[BLOCK - 1 :: BLOCK]
    blocks = torch.arange(count, device=bounds.device, dtype=torch.int32)
    seen = (blocks <= blocks[:, None]) & ((blocks + 1) * BLOCK > by_first[:, None])
    whole = (blocks < blocks[:, None]) & (blocks * BLOCK >= by_last[:, None])
    whole &= (blocks[:, None] + 1) * BLOCK <= tokens  # behind the last token nothing is seen

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= first_seen[query])

    return BlockMask.from_kv_blocks(
        *_in_order(seen & ~whole),
        *_in_order(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def _in_order(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row has, and the numbers of all, those first: int32 [1, 1, n], [1, 1, n, n]."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _end_to_end(states: torch.Tensor) -> torch.Tensor:
    """[rows, heads, tokens, d] to [rows * tokens, heads, d], which costs nothing as layers make them."""
    return states.transpose(1, 2).flatten(0, 1)


def _widened(states: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros up to `width` numbers a head; itself if it has as many, where `F.pad` would copy it."""
    missing = width - states.shape[-1]
    return F.pad(states, (0, missing)) if missing else states


def refuse_arguments(**arguments: Any) -> None:
    """Refuse what is asked of attention by an argument that it does not know.

    Raises:
        NotServed: an argument is given.
    """
    for name, value in arguments.items():
        if value is not None and value is not True and not (name == "dropout" and value == 0.0):
            raise NotServed(f"a layer gives attention an argument that this kernel does not know: {name}")


def grouped_heads(attention: Callable[..., Any]) -> dict[str, Any]:
    """The argument of `varlen_attn` for keys with fewer heads; torch 2.11 takes them without it."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(attention).parameters else {}


GROUPED = grouped_heads(varlen_attn)


def torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """A `Kernel`: PyTorch's FlashAttention. Its windows count the tokens before the one that looks."""
    before = -1 if window is None else window - 1
    return varlen_attn(
        *(query, key, value, bounds, bounds, longest, longest),
        scale=scale,
        window_size=(before, 0),
        **(GROUPED if query.shape[1] != key.shape[1] else {}),
    )  # pyright: ignore[reportReturnType] (a pair only if asked for)


def one_after_another(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """A `Kernel`: PyTorch's attention of each sample, on any device and in any data type; without windows.

    Args:
        bounds: on the CPU, or each layer would wait for the GPU.

    Raises:
        NotServed: a window is asked for, which takes a mask of all pairs of tokens.
    """
    if window is not None:
        raise NotServed(f"a layer has a window of {window} tokens")
    # Of keys that several heads share, PyTorch's kernels for float32 on GPUs want a copy for each head.
    shared = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(shared, 1) for states in (key, value))
    lengths: list[int] = bounds.diff().tolist()
    split = (states.transpose(0, 1)[None].split(lengths, 2) for states in (query, key, value))
    attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale)
    found = [attend(*one) for one in zip(*split, strict=True)]
    return torch.cat(found, 2)[0].transpose(0, 1)


def by_samples(kernel: Kernel) -> Callable[..., Result]:
    """transformers' attention function that computes with `kernel`."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        sample_bounds: torch.Tensor | None = None,
        longest_sample: int | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> Result:
        refuse_arguments(attention_mask=attention_mask, dropout=dropout, is_causal=is_causal)
        refuse_arguments(softcap=softcap, s_aux=s_aux, position_bias=position_bias)
        if _calls is not None:
            sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
            _calls.add(KernelCall(*sizes, query.dtype, scaling, sliding_window, softcap, s_aux is not None))
        if sample_bounds is None or longest_sample is None:
            raise NotServed("the model does not hand its layers where samples begin")
        rows, _heads, tokens, size = query.shape
        scale = scaling if scaling is not None else 1 / math.sqrt(size)
        # The kernel takes heads of one size, a multiple of 8; zeros change neither scores nor sums.
        width = -(-max(size, value.shape[-1]) // 8) * 8
        q, k, v = (_widened(_end_to_end(states), width) for states in (query, key, value))
        result = kernel(q, k, v, sample_bounds, longest_sample, scale, sliding_window)
        return result[..., : value.shape[-1]].unflatten(0, (rows, tokens)), None

    return attend


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def by_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    block_masks: dict[int, BlockMask] | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> Result:
    """transformers' attention function that computes with FlexAttention."""
    refuse_arguments(
        attention_mask=attention_mask, dropout=dropout, is_causal=is_causal, position_bias=position_bias
    )
    if _calls is not None:
        sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
        _calls.add(KernelCall(*sizes, query.dtype, scaling, sliding_window, softcap, s_aux is not None))
    if block_masks is None:
        raise NotServed("the model does not hand its layers where samples begin")
    if (sliding_window or 0) not in block_masks:
        raise NotServed(f"a layer has a window of {sliding_window} tokens, which config.json does not say")

    def cap(score: torch.Tensor, batch: Any, head: Any, of_query: Any, of_key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap) if softcap is not None else score

    rows, tokens = query.shape[0], query.shape[2]
    compiles = query.is_cuda and not torch.compiler.is_compiling()
    attend = _compiled_flex() if compiles else flex_attention
    result, more = attend(
        *(_end_to_end(states).transpose(0, 1)[None] for states in (query, key, value)),
        score_mod=cap if softcap is not None else None,
        block_mask=block_masks[sliding_window or 0],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=s_aux is not None),
    )
    if (
        s_aux is not None and more.lse is not None
    ):  # a sink is one more score in the softmax, of a value of zeros
        share = torch.sigmoid(more.lse - s_aux.float()[None, :, None])
        result = (result * share[..., None]).to(result.dtype)
    return result[0].transpose(0, 1).unflatten(0, (rows, tokens)), None


ALL_ATTENTION_FUNCTIONS.register(NAMES["varlen"], by_samples(torch_varlen))
ALL_ATTENTION_FUNCTIONS.register(NAMES["flex"], by_blocks)
ALL_ATTENTION_FUNCTIONS.register(NAMES["apart"], by_samples(one_after_another))
