"""How much memory training and serving take, by a model's shapes and the settings.

What follows from them is counted; the rest is estimated. GiB are 2^30 bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cairn.config.optimizer import BaseOptimizerConfig, StateSize
from cairn.config.trainer import TrainerBase
from cairn.run.batches import COLUMNS, EXPERTS
from cairn.run.machine import bytes_of

if TYPE_CHECKING:
    from cairn.trainer.models.footprint import Footprint  # which imports torch

GIB = 1 << 30
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
FROZEN = "weights of another model, by kl or distill"
CONTEXT = 3 * GIB // 2
"""On a GPU: CUDA's context, kernels, and NCCL's buffers."""
SLACK = 0.05
"""Share that PyTorch's allocator loses in blocks which fit nothing."""
UTILIZATION = 0.92
"""Share of a GPU that vLLM takes unless told otherwise."""
AWAKE = 5 * GIB // 2
"""On a GPU of a server: CUDA's context, CUDA graphs and activations."""
RECORDED = np.dtype(COLUMNS[EXPERTS].dtype).itemsize
"""Bytes of an expert's number in batches."""
PROCESS = GIB
"""Host memory of a rank's process: Python, torch, the data."""


@dataclass(frozen=True)
class MemoryPart:
    """Something that takes memory. counted: whether its size follows from shapes. kept: also between
    steps, when a server may be awake on the same GPU (the probe's forward pass gathers weights)."""

    what: str
    bytes: int
    counted: bool = True
    kept: bool = False


@dataclass(frozen=True)
class Need:
    """What something needs. share: what it needs it of, such as `a GPU`."""

    share: str
    parts: tuple[MemoryPart, ...]

    @property
    def counted(self) -> int:
        """Bytes that it needs for certain."""
        return sum(part.bytes for part in self.parts if part.counted)

    @property
    def total(self) -> int:
        """Bytes that it probably needs."""
        return sum(part.bytes for part in self.parts)

    @property
    def kept(self) -> int:
        """Bytes of what stays between two steps, that is counted."""
        return sum(part.bytes for part in self.parts if part.kept)

    def lines(self, has: int) -> list[str]:
        """For people, one line for all and one for each part."""
        return [
            f"needs about {gib(self.total)} {self.share}, has {gib(has)}:",
            *(
                f"  {gib(part.bytes):>10}  {part.what}{'' if part.counted else ' (estimated)'}"
                for part in self.parts
            ),
        ]


@dataclass(frozen=True)
class TrainedModel:
    """A model that is trained beside the policy; `name` is that of its section."""

    name: str
    footprint: "Footprint"
    optimizer: BaseOptimizerConfig

    def state(self, ranks: int) -> StateSize:
        """Weights and optimiser state, float32, on the fullest of so many ranks.

        Its gradients are as large as its weights. It has no output embeddings.
        """
        elements = self.elements(ranks)
        state = _state(self.footprint, self.optimizer, elements)
        return StateSize("weights and state", 4 * elements + state.bytes, state.counted)

    def elements(self, ranks: int) -> int:
        """The weights on the fullest of so many ranks."""
        return self.footprint.shard(ranks) - self.footprint.head // ranks


def rank_need(
    footprint: "Footprint",
    config: TrainerBase,
    *,
    ranks: int,
    gpu: bool,
    chunk_logits: int,
    beside: Sequence[TrainedModel] = (),
    frozen: Sequence["Footprint"] = (),
) -> Need:
    """What one rank of the trainer needs of its device, at the end of a backward pass.

    Args:
        frozen: models that score batches and are not trained.
        config: settled.
        gpu: whether it trains on a GPU.
        chunk_logits: largest number of logits at a time.
        beside: models that are trained beside the policy. They go forward and backward after it, so that
            their activations take no further memory, unless they are larger.
    """
    compute = footprint.width
    whole = _RANK_PARTS[config.backend](footprint, config, ranks, gpu, beside, frozen)
    parts = [*whole.parts]
    rows, tokens = max(-(-config.pass_tokens // config.seq_len), config.together), config.seq_len
    shared = config.parallel.context  # by so many ranks, each of which has all tokens for a part of the heads
    kept = footprint.kept.bytes(rows, tokens) // shared
    again = footprint.layer.bytes(rows, tokens) // shared
    scored = -(-rows * tokens // (shared * config.parallel.tensor))
    logits = min(scored * footprint.vocabulary, chunk_logits)
    head = footprint.head or footprint.embeddings
    on_ranks = f" on {shared} ranks" if shared > 1 else ""
    exchanged = 0
    if footprint.dealt_to > 1:
        exchanged = footprint.exchanged * rows * tokens // (shared * config.parallel.tensor)
    parts += [
        MemoryPart(f"activations of {rows} x {tokens} tokens{on_ranks}", kept, counted=False),
        MemoryPart("what experts on other ranks send back", exchanged, counted=False),
        MemoryPart("recorded experts, by router_replay",
             RECORDED * footprint.recorded * rows * tokens * config.replays_experts, counted=False),
        MemoryPart("one layer's backward pass", again // 2 + again * config.activation_checkpointing, False),
        MemoryPart("a chunk of logits, and the head's gradient",
             logits * (8 + compute) + head * (4 + compute), counted=False),
        MemoryPart("a layer gathered ahead", whole.ahead, counted=False),
    ]  # fmt: skip
    if gpu:
        so_far = sum(part.bytes for part in parts)
        parts.append(MemoryPart("CUDA, NCCL and fragments", CONTEXT + int(SLACK * so_far), counted=False))
    return Need("a GPU" if gpu else "a rank", tuple(part for part in parts if part.bytes))


class _RankParts(NamedTuple):
    """What a rank needs whatever it computes, by the backend.

    ahead: bytes of a layer that is gathered while another one computes.
    """

    parts: list[MemoryPart]
    ahead: int = 0


def _megatron(
    footprint: "Footprint",
    config: TrainerBase,
    ranks: int,
    gpu: bool,
    beside: Sequence[TrainedModel],
    frozen: Sequence["Footprint"],
) -> _RankParts:
    """With megatron-core: ranks that see other samples share the state alone. Other models are FSDP2's."""
    tensor, width = config.parallel.tensor, footprint.width
    stages = config.parallel.pipeline
    inside = sum(footprint.layers)
    outside = footprint.elements - inside
    if stages > 1:  # the first stage has the embedding, and the last one the rest, or a copy if it is tied
        outside = max(footprint.embeddings, outside - footprint.embeddings if footprint.head else outside)
    experts, data = footprint.experts // stages, ranks // (tensor * stages)
    dense = inside // stages - experts + outside
    own = -(-dense // tensor) + experts // footprint.dealt_to
    shard = -(-(dense + experts) // (tensor * data))
    state = _state(footprint, config.optimizer, shard)
    parts = [
        MemoryPart(f"weights, {config.precision.compute}", width * own, kept=True),
        MemoryPart("a share of the weights, float32", 0 if width == 4 else 4 * shard, kept=True),
        MemoryPart(f"gradients, {config.precision.reduce}", WIDTHS[config.precision.reduce] * own, kept=True),
        MemoryPart(state.what, state.bytes, counted=state.counted, kept=True),
        *_others(config, ranks, beside, frozen),
    ]
    gathered = [
        one.width * (max(one.gathered(1)) + one.staying)
        for one in (*frozen, *(other.footprint for other in beside))
    ]
    what = "weights gathered for a layer of another model, and its head"
    parts.append(MemoryPart(what, max(gathered, default=0), counted=False))
    return _RankParts(parts)


def _fsdp2(
    footprint: "Footprint",
    config: TrainerBase,
    ranks: int,
    gpu: bool,
    beside: Sequence[TrainedModel],
    frozen: Sequence["Footprint"],
) -> _RankParts:
    """With FSDP2: all ranks share weights, gradients and state, and gather weights."""
    elements = footprint.shard(ranks // config.replicas)
    trained = footprint.trained_shard(ranks // config.replicas)
    compute, reduce = footprint.width, WIDTHS[config.precision.reduce]
    on_host = config.state_on == "host"
    state = _state(footprint, config.optimizer, trained)
    parts: list[MemoryPart] = []
    if not (gpu and on_host):
        base = compute * (elements - trained)
        parts = [
            MemoryPart("weights, float32", 4 * trained, kept=True),
            MemoryPart(f"the adapter's base, {config.precision.compute}", base, kept=True),
            MemoryPart("gradients, float32", 4 * trained),
            MemoryPart(state.what, state.bytes, counted=state.counted, kept=True),
        ]
        parts += _others(config, ranks, beside, frozen)
    ahead = 0
    if not (ranks == 1 and compute == reduce == 4) or on_host:  # one rank in float32 has the plain model
        of_layers = footprint.gathered(config.parallel.tensor)
        layer = max(of_layers)
        gathered = sum(of_layers) if config.keep_gathered else layer
        what = "all layers" if config.keep_gathered else "a layer"
        parts += [
            MemoryPart(f"weights gathered for {what} and the head, {config.precision.compute}",
                 compute * (gathered + footprint.staying), kept=True),
            MemoryPart("gradients of a layer on their way to the ranks", (compute + reduce) * layer),
        ]  # fmt: skip
        ahead = 0 if config.keep_gathered else 2 * compute * layer
    return _RankParts(parts, ahead)


_RANK_PARTS: dict[str, Callable[..., _RankParts]] = {"fsdp2": _fsdp2, "megatron": _megatron}
"""By the backend's name."""


def _others(
    config: TrainerBase, ranks: int, beside: Sequence[TrainedModel], frozen: Sequence["Footprint"]
) -> list[MemoryPart]:
    """Models beside the policy, which all ranks share."""
    parts: list[MemoryPart] = []
    for one in beside:
        own = one.state(ranks // config.replicas)
        gradients = 4 * one.elements(ranks // config.replicas)
        parts += [
            MemoryPart(f"the {one.name}'s weights and state, float32", own.bytes, own.counted, kept=True),
            MemoryPart(f"the {one.name}'s gradients, float32", gradients),
        ]
    return parts + [
        MemoryPart(f"{FROZEN}, {config.precision.compute}", _held(one, config, ranks), kept=True)
        for one in frozen
    ]


def _held(frozen: "Footprint", config: TrainerBase, ranks: int) -> int:
    """Bytes that a rank holds of a model that is not trained."""
    return frozen.width * frozen.shard(ranks // config.replicas)


def host_need(
    footprint: "Footprint",
    rank: Need,
    config: TrainerBase,
    *,
    ranks: int,
    gpu: bool,
    beside: Sequence[TrainedModel] = (),
    frozen: Sequence["Footprint"] = (),
) -> Need:
    """What all ranks of one machine need of its memory.

    The copy of the state that a save takes is estimated, as a save goes in pieces where it does not fit.
    """
    parts = [MemoryPart(f"processes of {_ranks(ranks)}", PROCESS * ranks, counted=False)]
    if not gpu:
        counted = rank.counted * ranks
        parts = [
            MemoryPart(f"state of {_ranks(ranks)}", counted),
            MemoryPart("their activations", rank.total * ranks - counted, counted=False),
            *parts,
        ]
    if gpu and config.state_on == "host":
        elements, trained = (
            of(ranks // config.replicas) for of in (footprint.shard, footprint.trained_shard)
        )
        base = footprint.width * (elements - trained)
        state = (base + 8 * trained + _state(footprint, config.optimizer, trained).bytes) * ranks
        for one in beside:
            each = ranks // config.replicas
            state += (one.state(each).bytes + 4 * one.elements(each)) * ranks
        state += sum(_held(one, config, ranks) * ranks for one in frozen)
        parts.append(MemoryPart(f"state of {_ranks(ranks)}, by state_on = host", state))
    if config.ckpt:
        elements = footprint.trained_shard(1)
        copied = 0
        if config.ckpt.training_state:
            copied = _state(footprint, config.optimizer, elements).bytes
            copied += sum(one.state(1).bytes for one in beside)
        parts.append(MemoryPart("a copy of the state while it is saved", 4 * elements + copied, False))
    if (kind := config.keeps_published(gpu=gpu)) is not None:
        what = "the newest policy as servers have it, for deltas"
        parts.append(MemoryPart(what, WIDTHS[kind] * footprint.elements))
    return Need("of the machine's memory", tuple(parts))


def _state(footprint: "Footprint", optimizer: BaseOptimizerConfig, elements: int) -> StateSize:
    """The optimiser's state of a shard of so many elements."""
    hidden = elements * sum(footprint.layers) // footprint.elements
    return optimizer.state(hidden, elements - hidden)


def server_need(parameters: int, dtype: str, *, tensor_parallel: int, logits: int = 0) -> Need:
    """What one GPU of a server needs beside the cache of keys and values.

    vLLM does not look whether a full batch fits when it is given the size of that cache.

    Args:
        dtype: that the server computes in; auto: that of the files, as which 16 bits count.
        logits: numbers of a full batch, of each sequence as many as the vocabulary has tokens. They are
            there in float32, as logprobs, and as the noise of sampling with seeds.
    """
    weights = parameters * WIDTHS.get(dtype, 2) // tensor_parallel
    parts = (
        MemoryPart(f"weights, {'16 bits' if dtype == 'auto' else dtype}", weights),
        MemoryPart("CUDA, graphs and activations", AWAKE, counted=False),
        MemoryPart("logits, logprobs and noise of a full batch", 12 * logits, counted=False),
    )
    return Need("a GPU", tuple(part for part in parts if part.bytes))


def with_cache(server: Need, cache: str | None) -> Need:
    """What a server needs with a cache of keys and values of a size that was given; without one, the same."""
    if cache is None:
        return server
    return Need(
        server.share, (*server.parts, MemoryPart("keys and values (kv_cache_memory)", bytes_of(cache)))
    )


def cache_left(server: Need, has: int) -> int:
    """By estimate, what vLLM leaves for keys and values on a GPU with `has` bytes if it is given no size."""
    return max(0, int(UTILIZATION * has) - server.total)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def gib(number: int) -> str:
    """Bytes for people."""
    return f"{number / GIB:.1f} GiB" if number >= GIB // 10 else f"{number / (1 << 20):.1f} MiB"
