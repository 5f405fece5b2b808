"""How much memory training and serving take, and whether a machine has it.

What follows from a model's shapes and the settings is counted, and decides whether a run is refused; the rest
is estimated. Counting a model imports torch. GiB are 2^30 bytes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.tensors.remote_ranges import away_files
from cairn.config.inference import InferenceConfig
from cairn.config.optimizer import BaseOptimizerConfig, StateSize
from cairn.config.teachers import START, is_served
from cairn.config.trainer import POLICY_AGAIN, TrainerBase
from cairn.run.errors import UsageError
from cairn.run.machine import Machine, bytes_of
from cairn.run.output import importing

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
MOST_SEQUENCES = 1024
"""What vLLM chooses for `max_num_seqs` on a GPU with 70 GiB or more (`EngineArgs.get_batch_defaults`)."""
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
    elements = footprint.shard(ranks // config.replicas)
    trained = footprint.trained_shard(ranks // config.replicas)
    compute, reduce = footprint.width, WIDTHS[config.precision.reduce]
    on_host = config.state_on == "host"
    state = _state(footprint, config.optimizer, trained)
    parts: list[MemoryPart] = []
    if not (gpu and on_host):
        parts = [
            MemoryPart("weights, float32", 4 * elements, kept=True),
            MemoryPart("gradients, float32", 4 * trained),
            MemoryPart(state.what, state.bytes, counted=state.counted, kept=True),
        ]
        for one in beside:
            own = one.state(ranks // config.replicas)
            gradients = 4 * one.elements(ranks // config.replicas)
            parts += [
                MemoryPart(f"the {one.name}'s weights and state, float32", own.bytes, own.counted, kept=True),
                MemoryPart(f"the {one.name}'s gradients, float32", gradients),
            ]
        parts += [
            MemoryPart(f"{FROZEN}, {config.precision.compute}", _held(one, config, ranks), kept=True)
            for one in frozen
        ]
    rows, tokens = max(config.micro_batch_size, config.together), config.seq_len
    ahead = 0
    if not (ranks == 1 and compute == reduce == 4) or on_host:  # one rank in float32 has the plain model
        layer = max(footprint.layers)
        # Tied embeddings belong to the root, which stays gathered; an untied head does until its backward.
        staying = footprint.head or footprint.elements - sum(footprint.layers)
        parts += [
            MemoryPart(f"weights gathered for a layer and the head, {config.precision.compute}",
                 compute * (layer + staying), kept=True),
            MemoryPart("gradients of a layer on their way to the ranks", (compute + reduce) * layer),
        ]  # fmt: skip
        ahead = 2 * compute * layer
    kept = footprint.kept.bytes(rows, tokens)
    again = footprint.layer.bytes(rows, tokens)
    logits = min(rows * tokens * footprint.vocabulary, chunk_logits)
    head = footprint.head or footprint.embeddings
    parts += [
        MemoryPart(f"activations of {rows} x {tokens} tokens", kept, counted=False),
        MemoryPart("one layer's backward pass", again // 2 + again * config.activation_checkpointing, False),
        MemoryPart("a chunk of logits, and the head's gradient",
             logits * (8 + compute) + head * (4 + compute), counted=False),
        MemoryPart("a layer gathered ahead", ahead, counted=False),
    ]  # fmt: skip
    if gpu:
        so_far = sum(part.bytes for part in parts)
        parts.append(MemoryPart("CUDA, NCCL and fragments", CONTEXT + int(SLACK * so_far), counted=False))
    return Need("a GPU" if gpu else "a rank", tuple(part for part in parts if part.bytes))


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
        state = (4 * elements + 4 * trained + _state(footprint, config.optimizer, trained).bytes) * ranks
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


def check_training(
    rank: Need, host: Need, config: TrainerBase, machine: Machine, flags: str = "--"
) -> list[str]:
    """Compare what training needs with what the machine has; returns warnings.

    Args:
        config: its settings, of which those are named that would change something.
        machine: with the GPUs that train.
        flags: what the trainer's flags begin with.

    Raises:
        UsageError: what can be counted does not fit.
    """
    warnings = check_rank(rank, config, machine, flags) if machine.has_gpus else []
    fewer = [] if machine.has_gpus else _fewer_activations(config, flags)
    smaller = ["a smaller model", "a machine with more memory"]
    return warnings + _check("training", host, machine.memory, smaller, fewer)


def check_rank(rank: Need, config: TrainerBase, machine: Machine, flags: str = "--") -> list[str]:
    """Compare what a rank needs with what the smallest of its machine's GPUs has; see `check_training`."""
    has = min(gpu.memory for gpu in machine.gpus)
    helps = [f"more {flags}workers", "larger GPUs"]
    if config.replicas > 1:
        helps.insert(0, f"fewer {flags}replicas")
    if config.state_on == "device":
        helps.append(f"{flags}state-on host, which is slow")
    warnings = _check("training", rank, has, helps, _fewer_activations(config, flags))
    return warnings or [
        f"of GPU {gpu.index} {gib(gpu.used)} are in use, which leaves {gib(gpu.memory - gpu.used)} for a "
        f"rank that needs about {gib(rank.total)}: end what uses it (nvidia-smi names it), or choose other "
        f"GPUs with {flags}gpus"
        for gpu in machine.gpus
        if gpu.memory - gpu.used < rank.total
    ]


def _fewer_activations(config: TrainerBase, flags: str) -> list[str]:
    """The settings that lower what activations take, unless they are as low as can be."""
    fewer = [f"a lower {flags}micro-batch-size"] if config.micro_batch_size > 1 else []
    fewer += [f"a lower {flags}seq-len"]
    return fewer + ([] if config.activation_checkpointing else [f"{flags}activation-checkpointing"])


def check_serving(need: Need, machine: Machine, flags: str = "--") -> list[str]:
    """Compare what a server's weights need with what a GPU has; returns warnings.

    Raises:
        UsageError: the weights alone do not fit.
    """
    if not machine.has_gpus:
        return []
    has = min(gpu.memory for gpu in machine.gpus)
    helps = [f"more {flags}tensor-parallel", "larger GPUs"]
    if any("kv_cache_memory" in part.what for part in need.parts):
        helps.insert(0, f"a lower {flags}kv-cache-memory")
    return _check("the server", need, has, helps, [])


def _check(who: str, need: Need, has: int, helps: Sequence[str], fewer: Sequence[str]) -> list[str]:
    if need.counted > has:
        counted = "; ".join(f"{gib(part.bytes)} for {part.what}" for part in need.parts if part.counted)
        raise UsageError(
            f"{who} needs {gib(need.counted)} {need.share}, has {gib(has)}: {counted}; and more. "
            f"What helps: {', '.join(helps)}. --dry-run prints the whole estimate"
        )
    if need.total > has:
        return [
            f"{who} needs about {gib(need.total)} {need.share}, has {gib(has)}, as estimated "
            f"(--dry-run prints of what). What helps if it fails: {', '.join([*fewer, *helps])}"
        ]
    return []


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def gib(number: int) -> str:
    """Bytes for people."""
    return f"{number / GIB:.1f} GiB" if number >= GIB // 10 else f"{number / (1 << 20):.1f} MiB"


logger = logging.getLogger(__name__)


class Uncountable(Exception):
    """The model's code does not run without values, or there is no such model."""


@dataclass(frozen=True)
class TrainingNeeds:
    """What a rank needs of its device, and all ranks of a machine of its memory."""

    rank: Need
    host: Need


def training_needs(folder: str, config: TrainerBase, machine: Machine) -> TrainingNeeds:
    """What training the model in `folder` needs.

    Args:
        folder: Hugging Face directory; its weights are not read.
        config: settled, with the number of workers.
        machine: with the GPUs that train.

    Raises:
        Uncountable: the model can't be counted.
        UsageError: it can't have the attention that is asked for.
    """
    how: dict[str, Any] = {
        "compute": config.precision.compute,
        "activation_checkpointing": config.activation_checkpointing,
        "capability": min((gpu.capability for gpu in machine.gpus), default=None),
        "attention": config.attention,
    }
    footprint = _count(folder, lora=config.lora, **how)
    beside = [
        TrainedModel(name, _count(folder if one.model == POLICY_AGAIN else one.model, **how), one.optimizer)
        for name, one in config.auxiliary_models.items()
    ]
    compute = config.precision.compute
    frozen = [
        _count(one, compute=compute, activation_checkpointing=False) for one in frozen_folders(config, folder)
    ]
    from cairn.trainer.scoring.head import CHUNK_LOGITS

    gpu, ranks = machine.has_gpus, config.ranks
    chunk = CHUNK_LOGITS["cuda" if gpu else "cpu"]
    rank = rank_need(
        footprint, config, ranks=ranks, gpu=gpu, chunk_logits=chunk, beside=beside, frozen=frozen
    )
    host = host_need(footprint, rank, config, ranks=ranks, gpu=gpu, beside=beside, frozen=frozen)
    return TrainingNeeds(rank, host)


def frozen_folders(config: TrainerBase, folder: str) -> list[str]:
    """The folders, or names on the hub, of the models that the trainer holds beside the one in `folder`."""
    sources = {source for source in config.teachers.values() if not is_served(source)}
    folders = {folder if source == START else source for source in sources}
    steps = {one: StepFolder(Path(one)).model for one in folders}
    return sorted(str(model) if model.is_dir() else one for one, model in steps.items())


def serving_needs(folder: str, config: InferenceConfig) -> Need:
    """What a server on GPUs needs of each for the model in `folder`.

    Raises:
        Uncountable: the model can't be counted.
    """
    from cairn.inference.vllm_command import served_dtype

    dtype = served_dtype(config, folder, on_gpu=True)
    model = _count(folder, compute="bfloat16", activation_checkpointing=False)
    sequences = config.max_num_seqs or MOST_SEQUENCES
    return server_need(
        model.elements,
        dtype,
        tensor_parallel=config.tensor_parallel or 1,
        logits=sequences * model.vocabulary,
    )


def refuse_what_does_not_fit(folder: str, config: TrainerBase, machine: Machine, flags: str) -> None:
    """Check before a run starts that its trainer fits; prints a warning where that is not certain.

    On CPUs a model is counted only if it might not fit, since counting takes seconds.

    Raises:
        UsageError: it does not fit.
    """
    ranks = config.ranks
    folders = [
        folder,
        *(folder if m.model == POLICY_AGAIN else m.model for m in config.auxiliary_models.values()),
        *frozen_folders(config, folder),
    ]
    if not machine.has_gpus and sum(_at_most(one, ranks) for one in folders) < machine.memory:
        return
    try:
        needs = training_needs(folder, config, machine)
    except Uncountable as error:
        logger.warning("memory is not estimated: %s", error)
        return
    for warning in check_training(needs.rank, needs.host, config, machine, flags):
        print(f"warning: {warning}", flush=True)


def refuse_rank_that_does_not_fit(folder: str, config: TrainerBase, machine: Machine) -> None:
    """Check in a rank on a GPU that it fits, where the launcher could not know what the GPU has.

    Args:
        machine: as the rank sees it.

    Raises:
        UsageError: it does not fit.
    """
    if not machine.has_gpus:
        return
    try:
        rank = training_needs(folder, config, machine).rank
    except Uncountable as error:
        logger.warning("memory is not estimated: %s", error)
        return
    for warning in check_rank(rank, config, machine):
        logger.warning(warning)


def refuse_what_can_not_be_served(folder: str, config: InferenceConfig, machine: Machine, flags: str) -> None:
    """Check before a server starts that its weights, and a cache whose size was given, fit into a GPU.

    Raises:
        UsageError: they do not.
    """
    if not machine.has_gpus:
        return
    try:
        need = with_cache(serving_needs(folder, config), config.kv_cache_memory)
    except Uncountable as error:
        logger.warning("memory is not estimated: %s", error)
        return
    for warning in check_serving(need, machine, flags):
        print(f"warning: {warning}", flush=True)


def _at_most(folder: str, ranks: int) -> int:
    """More than all ranks on a CPU need of what can be counted, going by the files' sizes."""
    sizes = {path.name: path.stat().st_size for path in Path(folder).glob("*.safetensors")}
    sizes |= {name: file.size for name, file in away_files(Path(folder)).items() if name in sizes}
    parameters = sum(sizes.values()) // 2
    return parameters * (16 + 10 * ranks)


def _count(folder: str, **how: Any) -> "Footprint":
    """The model's footprint; `how`: further arguments of `footprint_of`."""
    with importing():
        from cairn.trainer.models.footprint import footprint_of

    try:
        return footprint_of(folder, **how)
    except UsageError:
        raise
    except Exception as error:  # the model's own code, of any family
        reason = str(error).strip().partition("\n")[0]
        raise Uncountable(f"{folder}: {type(error).__name__}: {reason}") from None
