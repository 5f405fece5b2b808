"""Attention over packed rows without masks of all pairs of tokens: which kernel computes it for a model.

A micro-batch says where each of its samples begins. The kernels here take the rows as one long row and work
on each sample's tokens alone, so that time and memory grow with the samples and not with the rows:

- varlen, PyTorch's own FlashAttention for samples of different lengths. It computes in 16 bits on GPUs, knows
  windows, and takes heads of up to 256.
- flex, FlexAttention with a mask of blocks, which torch.compile makes into a kernel for soft-capped scores,
  attention sinks and larger heads as well.
- apart, PyTorch's attention of one sample after the other, on any device and in any data type, but without
  windows. It is for megatron-core's layers where neither of the others serves.

Models call them through transformers' `AttentionInterface` and hand them the bounds of samples among the
arguments of their forward pass. A model that passes those on to none of its layers gets an error, and so the
attention that it has of its own (dense), which makes masks of all pairs from the positions of tokens.

How samples lie in rows so that none sees another depends on the model, too. Most models keep samples apart by
their positions, which start at 0 with each sample, so that several samples can share a row. Some models need
masks for that. Models that carry state from token to token (state spaces, convolutions, linear attention), or
that measure distances by the place in the row (ALiBi), get one sample a row.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.context import NAMES as OVER_RANKS
from cairn.trainer.attention.context import masks_of_rows, widened
from cairn.trainer.attention.kernels import NAMES, KernelCall, make_block_mask
from cairn.trainer.group import NO_AXIS, Axis
from cairn.trainer.packing import Arrange, MicroBatch, fill_rows, one_a_row, shared_rows

Kind = Literal["dense", "varlen", "flex", "apart"]
VARLEN_HEAD, FLEX_HEAD = 256, 16
"""Largest head of FlashAttention, and smallest of FlexAttention."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""What configurations call the dropout of attention."""
DRAWN = ("dropout", "activation_dropout", "layerdrop", "router_jitter_noise", "input_jitter_noise")
"""What they call other dropout and noise that is no module of its own."""


@dataclass(frozen=True)
class Attention:
    """The attention of a model's layers; transformers knows it by `name`.

    windows: of each layer; None for a layer that sees all tokens before. calls: what layers have asked of the
    kernel. context: the ranks that share the tokens of each row.
    """

    kind: Kind
    name: str
    windows: tuple[int | None, ...] = (None,)
    calls: frozenset[KernelCall] = frozenset()
    context: Axis = NO_AXIS

    def __str__(self) -> str:
        """As people are told: the kernel, and for which kinds of layers; of the model's own, its name."""
        shared = f" on {self.context.size} ranks" if self.context.size > 1 else ""
        if self.kind == "dense":
            return f"dense{shared or f' ({self.name})'}"
        layers = sorted({_kind_of_layer(call) for call in self.calls})
        return f"{self.kind}{shared} ({'; '.join(layers)})" if layers else self.kind + shared

    def over(self, context: Axis) -> "Attention":
        """The same with the tokens of each row on the ranks of `context`."""
        return replace(self, name=OVER_RANKS[self.kind], context=context)

    @property
    def alone(self) -> "Attention":
        """The kernel itself, as one rank calls it."""
        return replace(self, name=NAMES[self.kind], context=NO_AXIS) if self.kind != "dense" else self

    def use(self, model: PreTrainedModel) -> None:
        """Let the model's layers compute with it."""
        if model.config._attn_implementation != self.name:
            model.set_attn_implementation(self.name)

    def arguments(self, micro: MicroBatch) -> dict[str, Any]:
        """What the model's forward has to hand to its layers for this micro-batch."""
        axis = {}
        if self.context.size > 1:
            axis, micro = {"context_axis": self.context}, widened(micro, self.context.size)
        if self.kind == "varlen":
            return {"sample_bounds": micro.bounds, "longest_sample": micro.longest, **axis}
        if self.kind == "apart":
            return {"sample_bounds": micro.bounds.cpu(), "longest_sample": micro.longest}
        if self.kind == "flex":
            tokens = micro.input_ids.numel()
            masks = {window or 0: make_block_mask(micro.bounds, tokens, window) for window in self.windows}
            return {"block_masks": masks, **axis}
        return {"row_masks": masks_of_rows(micro, self.windows), **axis} if axis else {}


def _kind_of_layer(call: KernelCall) -> str:
    """How far a layer sees, and what it adds to that."""
    seen = "all tokens before" if call.window is None else f"window of {call.window}"
    capped = f", scores capped at {call.softcap:g}" if call.softcap is not None else ""
    return seen + capped + (", sinks" if call.has_sinks else "")


@dataclass(frozen=True)
class Device:
    """What the choice depends on beside the model. capability: of the GPU, such as (9, 0); None for a CPU."""

    capability: tuple[int, int] | None
    compute: torch.dtype

    @classmethod
    def of(cls, device: torch.device, compute: torch.dtype) -> "Device":
        """This process's."""
        on_gpu = device.type == "cuda"
        return cls(torch.cuda.get_device_capability(device) if on_gpu else None, compute)


def choose(
    asked: Literal["auto", "dense", "varlen", "flex"], model: PreTrainedModel, device: Device
) -> tuple[Attention | None, str]:
    """The attention to try before the model's own, and in words why; None if there is none to try.

    Args:
        asked: the setting `attention`.

    Raises:
        UsageError: what is asked for can't serve the model on this device.
    """
    if asked == "dense":
        return None, "asked for"
    problems: dict[Literal["varlen", "flex"], str | None] = {
        "varlen": _varlen_problem(model, device),
        "flex": _flex_problem(model, device),
    }
    if asked != "auto":
        if problem := problems[asked]:
            raise UsageError(f"attention = {asked!r} can't serve {type(model).__name__}: {problem}")
        return make_attention(asked, model), "asked for"
    if device.capability is None:
        return None, "on CPUs"
    if device.compute == torch.float32:
        return None, "in float32"
    for kind, problem in problems.items():
        if problem is None:
            return make_attention(kind, model), problems["varlen"] or "for bfloat16 on GPUs"
    return None, "; ".join(f"{kind}: {problem}" for kind, problem in problems.items())


def make_attention(kind: Literal["varlen", "flex"], model: PreTrainedModel) -> Attention:
    """Attention by this kernel."""
    return Attention(kind, NAMES[kind], _windows_of(model))


APART = Attention("apart", NAMES["apart"])
"""One sample after the other."""


def over_ranks(kernel: Attention | None, model: PreTrainedModel, context: Axis) -> list[Attention]:
    """The attentions to try, in this order, where ranks share the tokens of each row.

    Args:
        kernel: that `choose` prefers to the model's own attention.

    Raises:
        UsageError: none can serve the model.
    """
    check_context(model, context.size)
    masks = Attention("dense", OVER_RANKS["dense"], _windows_of(model))
    return [one.over(context) for one in (kernel, masks) if one]


def check_context(model: PreTrainedModel, ranks: int, tensor: int = 1) -> None:
    """Check that so many ranks can share the tokens of the model's rows, as far as is known without trying.

    Args:
        tensor: so many ranks share its heads.

    Raises:
        UsageError: they can't.
    """
    if ranks > 1 and (problem := _context_problem(model, ranks, tensor)):
        raise UsageError(f"parallel.context = {ranks} can't serve {name_of(model)}: {problem}")


def name_of(model: torch.nn.Module) -> str:
    """As its makers call it; FSDP2 makes a class of its own."""
    return type(model).__name__.removeprefix("FSDP")


def _context_problem(model: PreTrainedModel, ranks: int, tensor: int) -> str | None:
    config = model.config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", None) or 0
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers of the kind {min(kinds)} carry state from token to token, or attend in another way"
    if heads % (ranks * tensor):
        shared = f" by it and parallel.tensor = {tensor}" if tensor > 1 else ""
        return f"its {heads} attention heads can't be shared equally{shared}; take a number that divides them"
    if getattr(config, "sliding_window", None) and not model._supports_flash_attn:
        return "it has windows that only its own masks know"
    if draws_numbers(model, DRAWN):
        return "it has dropout or noise, whose draws for a token would depend on the rank that computes it"
    return _problem(model)


def draws_numbers(model: PreTrainedModel, names: Sequence[str]) -> bool:
    """Whether a model that is trained has dropout or noise: by these settings of it, or by its modules."""
    config = model.config.get_text_config()
    drawn = any(getattr(config, name, None) for name in names)
    drawn = drawn or any(isinstance(one, torch.nn.Dropout) and one.p for one in model.modules())
    return drawn and any(parameter.requires_grad for parameter in model.parameters())


def _windows_of(model: PreTrainedModel) -> tuple[int | None, ...]:
    return tuple({None, getattr(model.config.get_text_config(), "sliding_window", None)})


def dense(model: PreTrainedModel) -> Attention:
    """The attention that the model has now, which is its own unless another was taken into use."""
    return Attention("dense", model.config._attn_implementation or "eager")


def _problem(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if not model._can_set_attn_implementation():
        return "its layers compute attention in code of their own"
    if any(getattr(config, name, None) for name in DROPOUTS):
        return "it has dropout of attention, which no kernel computes"
    if getattr(config, "attention_chunk_size", None) or "chunked_attention" in (
        getattr(config, "layer_types", None) or ()
    ):
        return "it attends within chunks"
    return None


def _varlen_problem(model: PreTrainedModel, device: Device) -> str | None:
    if device.capability is None:
        return "it runs on GPUs alone"
    if device.capability < (8, 0):
        return "it needs a GPU of compute capability 8.0"
    if device.compute not in (torch.bfloat16, torch.float16):
        return "it computes in 16 bits alone (precision.compute)"
    if not model._supports_flash_attn:
        return "transformers does not let the model use FlashAttention"
    if caps_attention(model):
        return "the model soft-caps attention"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "the model has attention sinks"
    if (largest := max(_head_sizes(model))) > VARLEN_HEAD:
        return f"its heads are larger than {VARLEN_HEAD} ({largest})"
    return _problem(model)


def _flex_problem(model: PreTrainedModel, device: Device) -> str | None:
    if device.capability is None:
        return "it has no backward pass on CPUs"
    if not model._supports_flex_attn:
        return "transformers does not let the model use FlexAttention"
    if (smallest := min(_head_sizes(model))) < FLEX_HEAD:
        return f"its heads are smaller than {FLEX_HEAD} ({smallest})"
    return _problem(model)


def caps_attention(model: PreTrainedModel) -> bool:
    """Whether the scores of attention are soft-capped, as in Gemma 2."""
    caps = (getattr(module, "attn_logit_softcapping", None) for module in model.modules())
    return any(cap is not None for cap in caps)


def _head_sizes(model: PreTrainedModel) -> list[int]:
    """Of queries and values, as far as the configuration says; the kernels' own checks find the rest."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    sizes = [
        getattr(config, "qk_nope_head_dim", None) or 0,
        getattr(config, "global_head_dim", None),
        getattr(config, "v_head_dim", None),
    ]
    sizes[0] += getattr(config, "qk_rope_head_dim", None) or 0
    if not any(sizes):
        sizes = [getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)]
    return [size for size in sizes if size] or [VARLEN_HEAD]


@dataclass(frozen=True)
class Rows:
    """One way to lay samples in rows; `ROWS` lists all ways.

    arrange: which samples share a row. arguments: further arguments of the model's forward, computed from its
    configuration and the positions of the tokens (int64 [R, T]).
    """

    name: str
    arrange: Arrange
    arguments: Callable[[PreTrainedConfig, torch.Tensor], dict[str, Any]]


class NoMasks(Exception):
    """transformers can't make masks for the model's layers."""


def _nothing(config: PreTrainedConfig, position_ids: torch.Tensor) -> dict[str, Any]:
    return {}


def _masks(config: PreTrainedConfig, position_ids: torch.Tensor) -> dict[str, Any]:
    """Attention masks that keep samples apart by their positions, sliding windows included.

    Raises:
        NoMasks: transformers makes none for such layers.
    """
    like = torch.empty(*position_ids.shape, 0, device=position_ids.device)  # only its shape and type count
    masks = create_masks_for_generate(config, like, None, None, position_ids=position_ids)
    if masks is None:
        raise NoMasks("transformers makes no masks for its layers")
    return {"attention_mask": masks}


BY_POSITIONS = Rows("packed", shared_rows, _nothing)
BY_MASKS = Rows("packed, with masks", shared_rows, _masks)
ALONE = Rows("one sample a row", one_a_row, _nothing)
ROWS = (BY_POSITIONS, BY_MASKS, ALONE)
"""The fastest first."""


# A check of attention kernels as a model's layers call them, forward and backward, on the device at hand.


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
