# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What of a model takes memory while it is trained, counted without any: on torch's meta device."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.config.model import LoraConfig
from cairn.policy.generation import expert_bytes
from cairn.trainer.attention.choice import Device, caps_attention, check_context, choose
from cairn.trainer.backends.experts import check_experts, sharded_dimension
from cairn.trainer.backends.tensor import check_tensor
from cairn.trainer.models.lora import adapt
from cairn.trainer.models.model import layers_of

COUNTED_TOKENS = 16
"""Tokens of a row whose activations are counted, and twice as many; longer rows follow from the two."""
ATTENTION = "cairn_footprint"
EXPERTS = ".experts."
"""In the names of parameters of which a token uses those of its experts alone."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "moe_top_k")
"""What families call the number of experts in config.json, and that of a token."""


@dataclass(frozen=True)
class Growth:
    """Bytes that grow with the tokens of a row: with each token, and with each pair of tokens."""

    each: float
    pair: float

    @classmethod
    def through(cls, tokens: int, once: int, twice: int) -> "Growth":
        """What takes `once` bytes with so many tokens, and `twice` with twice as many."""
        pair = max(0.0, (twice - 2 * once) / (2 * tokens**2))
        return cls(once / tokens - pair * tokens, pair)

    def times(self, factor: float) -> "Growth":
        """As many times as much."""
        return Growth(self.each * factor, self.pair * factor)

    def bytes(self, rows: int, tokens: int) -> int:
        """For so many rows of so many tokens."""
        return int(rows * (self.each * tokens + self.pair * tokens**2))


@dataclass(frozen=True)
class Footprint:
    """What of a model takes memory.

    shapes: of all parameters, a tied one once. trained: of those that are trained, if that is an adapter;
    None: all. layers: numbers of elements in each decoder layer. embeddings,
    head: elements of the input and output embeddings; head is 0 if it is tied or there is none. vocabulary:
    number of logits per token. kept: what the forward pass keeps of activations for the backward pass, of all
    layers. layer: the same of one layer whose activations are all kept. width: bytes of an element in the
    type that is computed in. expert_shapes: of the parameters of experts, in each decoder layer. chosen: the
    share of the experts that a token uses; 1 if it is not known. dealt_to: so many ranks have the experts of
    a layer together. exchanged: of each token, bytes of what its experts send back, in all layers
    that keep it at once. recorded: the experts that servers tell of each token, in all layers together; 0 if
    the model has none.
    """

    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    embeddings: int
    head: int
    vocabulary: int
    kept: Growth
    layer: Growth
    width: int
    trained: tuple[tuple[int, ...], ...] | None = None
    expert_shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    chosen: float = 1.0
    dealt_to: int = 1
    exchanged: int = 0
    recorded: int = 0

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(map(prod, self.shapes))

    @property
    def staying(self) -> int:
        """The elements that stay gathered while layers are computed.

        An untied head does until its backward pass; tied embeddings belong to the root, with all that is in
        no layer.
        """
        return self.head or self.elements - sum(self.layers)

    def gathered(self, tensor: int) -> tuple[int, ...]:
        """The elements of each decoder layer that a rank needs at once: its own experts, a part of the rest.

        Args:
            tensor: ranks that share the matrices of each layer.
        """
        found: list[int] = []
        none: tuple[tuple[int, ...], ...] = ()
        of_experts = self.expert_shapes or [none] * len(self.layers)
        for layer, shapes in zip(self.layers, of_experts, strict=True):
            experts = sum(map(prod, shapes))
            found.append((layer - experts) // tensor + experts // self.dealt_to)
        return tuple(found)

    @property
    def experts(self) -> int:
        """The number of elements that belong to experts."""
        return sum(prod(shape) for layer in self.expert_shapes for shape in layer)

    @property
    def recorded_bytes(self) -> int:
        """Bytes of a token's recorded experts in the ledger."""
        most = max((shape[0] for layer in self.expert_shapes for shape in layer), default=0)
        return self.recorded * expert_bytes(most)

    def shard(self, ranks: int) -> int:
        """The elements that the fullest rank holds: FSDP2 cuts each parameter along its first dimension.

        Args:
            ranks: a multiple of those that have experts together, or 1: of all elements.
        """
        if self.dealt_to == 1 or ranks == 1:
            return _shard(self.shapes, ranks)
        experts = [shape for layer in self.expert_shapes for shape in layer]
        dealt, shards = self.dealt_to, ranks // self.dealt_to
        own = [(shape[0] // dealt, *shape[1:]) for shape in experts]
        moved = [
            (shape[dim], *shape[:dim], *shape[dim + 1 :])
            for shape, whole in zip(own, experts, strict=True)
            for dim in [sharded_dimension(whole, dealt, shards)]
        ]
        return _shard(self.shapes, ranks) - _shard(experts, ranks) + _shard(moved, shards)

    def trained_shard(self, ranks: int) -> int:
        """The same of what is trained."""
        return self.shard(ranks) if self.trained is None else _shard(self.trained, ranks)


def _shard(shapes: Iterable[tuple[int, ...]], ranks: int) -> int:
    return sum(-(-shape[0] // ranks) * prod(shape[1:]) if shape else 1 for shape in shapes)


def footprint_of(
    folder: str,
    *,
    compute: str,
    activation_checkpointing: bool,
    capability: tuple[int, int] | None = None,
    attention: Literal["auto", "dense", "varlen", "flex"] = "auto",
    lora: LoraConfig | None = None,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    is_policy: bool = True,
) -> Footprint:
    """Count the model that the Hugging Face directory (or hub name) `folder` describes; needs no weights.

    Attention is taken to keep its inputs and outputs, as fused kernels do, and no mask, unless the model
    computes it in code of its own. It takes a second or two, and memory only for what is no parameter.

    Args:
        capability: CUDA's, of the GPU that trains; None on a CPU.
        attention, lora: the settings of these names.
        context: ranks that share the tokens of each row.
        tensor: ranks that share the matrices of each layer, and so what layers keep beside hidden states.
        expert: ranks that have the experts of each layer together.
        is_policy: as for `check_shared`.

    Raises:
        UsageError: the model can't have the attention that is asked for, or ranks can't share its rows,
            matrices or experts.
        Exception: whatever transformers or the model's code raise; not every model runs without values.
    """
    dtype = DTYPES_IN_SETTINGS[compute]
    with _quiet():
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))
        model.tie_weights()
        model.train()
        AttentionInterface.register(ATTENTION, _attend)
        kernel, _ = choose(attention, model, Device(capability, dtype))
        check_context(model, context, tensor)
        layers = layers_of(model)
        check_tensor(model, layers, tensor, expert)
        check_experts(model, layers, expert, needed=is_policy)
        if kernel or model.config._attn_implementation == "sdpa":
            dense = kernel is None and caps_attention(model)
            model.set_attn_implementation("eager" if dense else ATTENTION)
        whole = kept = _growth(model, tensor)
        if activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            kept = _growth(model, tensor)
    trained = None
    if lora:
        adapt(model, lora)
        trained = tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad)
    embeddings: Any = model.get_input_embeddings()
    experts = tuple(tuple(_experts_of(layer)) for layer in layers)
    text = config.get_text_config()
    per_token = next((value for name in CHOSEN if isinstance(value := getattr(text, name, None), int)), 1)
    kept_layers = min(sum(map(bool, experts)), 1 if activation_checkpointing else len(layers))
    weight: Any = getattr(model.get_output_embeddings(), "weight", None)
    head = 0 if weight is None or weight is embeddings.weight else int(weight.numel())
    return Footprint(
        shapes=tuple(tuple(p.shape) for p in model.parameters()),
        layers=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
        embeddings=sum(p.numel() for p in embeddings.parameters()),
        head=head,
        vocabulary=int(config.get_text_config().vocab_size),
        kept=kept,
        layer=whole.times(1 / len(layers)),
        width=dtype.itemsize,
        trained=trained,
        expert_shapes=experts,
        chosen=active_experts(text) or 1.0,
        dealt_to=expert if any(experts) else 1,
        exchanged=kept_layers * per_token * text.hidden_size * dtype.itemsize,
        recorded=per_token * len(layers) if any(experts) else 0,
    )


def _experts_of(layer: torch.nn.Module) -> Iterator[tuple[int, ...]]:
    """The shapes of a layer's parameters of experts."""
    for name, parameter in layer.named_parameters():
        if EXPERTS in f".{name}":
            yield tuple(parameter.shape)


def active_experts(config: Any) -> float | None:
    """Which share of the experts a token uses, by a configuration for text; None if it does not say."""
    count = next((value for name in COUNTS if isinstance(value := getattr(config, name, None), int)), None)
    chosen = next((value for name in CHOSEN if isinstance(value := getattr(config, name, None), int)), None)
    return chosen / count if count and chosen else None


def _growth(model: PreTrainedModel, tensor: int) -> Growth:
    n = COUNTED_TOKENS
    try:
        return Growth.through(n, _kept(model, n, tensor), _kept(model, 2 * n, tensor))
    except RuntimeError:
        if next(model.parameters()).dtype != torch.float32:
            raise
    # On the meta device, torch multiplies groups (experts) in bfloat16 only.
    torch.nn.Module.bfloat16(model)
    return Growth.through(n, _kept(model, n, tensor), _kept(model, 2 * n, tensor)).times(2)


def _kept(model: PreTrainedModel, tokens: int, tensor: int) -> int:
    """Bytes that one row's forward pass, but for the head, keeps for the backward pass beside weights.

    Of so many ranks that share matrices each keeps what is as wide as hidden states, and its part of what
    else there is.
    """
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    of_model = [*model.parameters(), *model.buffers()]
    known = {_storage_of(tensor) for tensor in of_model}
    kept: dict[int, torch.Tensor] = {}  # tensors are held, or another could get a storage's number

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (number := _storage_of(tensor)) not in known:
            kept[number] = tensor
        return tensor

    places = torch.arange(tokens, device="meta")[None]
    # Without a mask, and with another attention than ours, transformers would look at the places' values.
    fused = model.config._attn_implementation == ATTENTION
    mask = None if fused else torch.ones(1, tokens, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=places, position_ids=places, attention_mask=mask, use_cache=False)
    return sum(
        one.untyped_storage().nbytes() // (1 if one.shape[-1:] == (width,) else tensor)
        for one in kept.values()
    )


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Fused(torch.autograd.Function):
    """Attention as fused kernels do it, but for the values: what it keeps is what counts here."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return cast(torch.Tensor, _Fused.apply(query, key, value)).transpose(1, 2), None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on kernels and the like."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
