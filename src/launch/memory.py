"""Whether a machine has the memory that training and serving take.

What can be counted decides whether a run is refused; what is estimated makes a warning. Counting a model
imports torch.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.tensors.remote_ranges import away_files
from cairn.config.inference import InferenceConfig
from cairn.config.teachers import POLICY_AGAIN, START, is_served
from cairn.config.trainer import TrainerBase
from cairn.launch.needs import Need, TrainedModel, gib, host_need, rank_need, server_need, with_cache
from cairn.run.errors import UsageError
from cairn.run.machine import Machine
from cairn.run.output import importing

if TYPE_CHECKING:
    from cairn.trainer.models.footprint import Footprint  # which imports torch

logger = logging.getLogger(__name__)
PASS_TOKENS = 16_384
"""Tokens of a pass that keep a GPU busy: for 94 to 98 % of the time in models of 0.6B and 1.7B, where 4,096
tokens do for 54 to 63 % (docs/results/gpu.md)."""
ROOM = 0.8
"""Share of a GPU's memory that rows beyond the first may fill: estimates were up to 14 % too low there."""
MOST_SEQUENCES = 1024
"""What vLLM chooses for `max_num_seqs` on a GPU with 70 GiB or more (`EngineArgs.get_batch_defaults`)."""


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
    fewer = [f"a lower {flags}micro-batch-size"] if config.rows > 1 else []
    if config.micro_batch_tokens is not None and config.micro_batch_tokens > config.seq_len:
        fewer = [f"a lower {flags}micro-batch-tokens"]
    fewer += [f"a lower {flags}seq-len"]
    fewer += [] if config.activation_checkpointing else [f"{flags}activation-checkpointing"]
    return fewer + ([f"a larger {flags}parallel.context"] if config.ranks > config.parallel.context else [])


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


class Uncountable(Exception):
    """The model's code does not run without values, or there is no such model."""


@dataclass(frozen=True)
class TrainingNeeds:
    """What a rank needs of its device, and all ranks of a machine of its memory."""

    rank: Need
    host: Need


@dataclass(frozen=True)
class CountedModels:
    """The models that ranks hold, counted, from which follows what they need under several settings.

    policy: the model that is trained. beside: those trained with it. frozen: those that score batches.
    """

    policy: "Footprint"
    beside: tuple[TrainedModel, ...] = ()
    frozen: tuple["Footprint", ...] = ()

    def needs(self, config: TrainerBase, machine: Machine) -> TrainingNeeds:
        """What training them needs.

        Args:
            config: settled, with the number of workers; equal to the settings they were counted with in what
                `count_models` reads.
            machine: with the GPUs that train.
        """
        from cairn.trainer.scoring.head import CHUNK_LOGITS

        gpu, ranks = machine.has_gpus, config.ranks
        chunk = CHUNK_LOGITS["cuda" if gpu else "cpu"]
        others: dict[str, Any] = {"ranks": ranks, "gpu": gpu, "beside": self.beside, "frozen": self.frozen}
        rank = rank_need(self.policy, config, chunk_logits=chunk, **others)
        return TrainingNeeds(rank, host_need(self.policy, rank, config, **others))

    def with_room_used(self, config: TrainerBase, machine: Machine) -> TrainerBase:
        """The configuration with `micro_batch_size` and `keep_gathered`, which are open, where GPUs have room
        by estimate: rows first, since passes over few tokens wait for kernels to be launched.

        Neither where servers take what is left, and no gathered layers beside other models, of which each
        would need as much.
        """
        if not machine.has_gpus or config.state_on == "host" or config.shares_gpu:
            return config
        has = min(gpu.memory for gpu in machine.gpus)
        if config.micro_batch_tokens is None:
            sizes = [1 << power for power in range(1, (PASS_TOKENS // config.seq_len).bit_length())]
            fitting = [n for n in sizes if self._taken(config, machine, micro_batch_size=n) <= ROOM * has]
            config = config.left_to(micro_batch_size=max(fitting, default=None))
        alone = not self.beside and not self.frozen and config.backend == "fsdp2"
        if alone and self._taken(config, machine, keep_gathered=True) <= has:
            config = config.left_to(keep_gathered=True)
        return config

    def _taken(self, config: TrainerBase, machine: Machine, **others: Any) -> int:
        """Bytes that a rank takes with other settings."""
        return self.needs(config.model_copy(update=others), machine).rank.total


def count_models(folder: str, config: TrainerBase, machine: Machine) -> CountedModels:
    """Count the models that a trainer of the one in `folder` holds; each takes a second or two.

    Args:
        folder: Hugging Face directory; its weights are not read.
        config: settled. Read are the models, the adapter, the type that is computed in, attention,
            whether activations are recomputed, and how many ranks share rows, matrices or experts.
        machine: with the GPUs that train.

    Raises:
        Uncountable: a model can't be counted.
        UsageError: it can't have the attention that is asked for.
    """
    compute = config.precision.compute
    how: dict[str, Any] = {
        "compute": compute,
        "activation_checkpointing": config.activation_checkpointing,
        "capability": min((gpu.capability for gpu in machine.gpus), default=None),
        "attention": config.attention,
        "context": config.parallel.context,
        "tensor": config.parallel.tensor,
        "expert": config.parallel.expert,
    }
    policy = count(folder, lora=config.lora, **how)
    shared = config.beside_policy.parallel
    how |= {"is_policy": False, "tensor": shared.tensor, "expert": shared.expert}
    beside = (
        TrainedModel(name, count(folder if one.model == POLICY_AGAIN else one.model, **how), one.optimizer)
        for name, one in config.auxiliary_models.items()
    )
    only_scoring = {"activation_checkpointing": False, "capability": None, "attention": "auto", "context": 1}
    frozen = (count(one, **how | only_scoring) for one in frozen_folders(config, folder))
    return CountedModels(policy, tuple(beside), tuple(frozen))


def counted_if_possible(folder: str, config: TrainerBase, machine: Machine) -> CountedModels | None:
    """The same for those who go on without an estimate; the reason is logged.

    Raises:
        UsageError: the model can't have the attention that is asked for.
    """
    try:
        return count_models(folder, config, machine)
    except Uncountable as error:
        logger.warning("memory is not estimated: %s", error)
        return None


def training_needs(folder: str, config: TrainerBase, machine: Machine) -> TrainingNeeds:
    """What training the model in `folder` needs: see `count_models` and `CountedModels.needs`.

    Raises:
        Uncountable: the model can't be counted.
        UsageError: it can't have the attention that is asked for.
    """
    return count_models(folder, config, machine).needs(config, machine)


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
    return needs_of_server(count(folder, **SERVED), folder, config)


SERVED: dict[str, Any] = {"compute": "bfloat16", "activation_checkpointing": False}
"""How a model that is only served is counted."""


def needs_of_server(model: "Footprint", folder: str, config: InferenceConfig) -> Need:
    """The same, once the model in `folder` is counted."""
    from cairn.inference.vllm_command import served_dtype

    sequences = config.max_num_seqs or MOST_SEQUENCES
    return server_need(
        model.elements,
        served_dtype(config, folder, on_gpu=True),
        tensor_parallel=config.tensor_parallel or 1,
        logits=sequences * model.vocabulary,
    )


def might_not_fit(folder: str, config: TrainerBase, machine: Machine) -> bool:
    """Whether models have to be counted to know that they fit.

    On CPUs mostly not, since counting takes seconds: going by their files' sizes, they fit in any case.
    """
    folders = [
        folder,
        *(folder if m.model == POLICY_AGAIN else m.model for m in config.auxiliary_models.values()),
        *frozen_folders(config, folder),
    ]
    return machine.has_gpus or sum(_at_most(one, config.ranks) for one in folders) >= machine.memory


def refuse_what_does_not_fit(
    counted: CountedModels | None, config: TrainerBase, machine: Machine, flags: str
) -> None:
    """Check before a run starts that its trainer fits; prints a warning where that is not certain.

    Args:
        counted: None if the models fit in any case, or could not be counted.

    Raises:
        UsageError: it does not fit.
    """
    if counted is None:
        return
    needs = counted.needs(config, machine)
    for warning in check_training(needs.rank, needs.host, config, machine, flags):
        print(f"warning: {warning}", flush=True)


def refuse_rank_that_does_not_fit(counted: CountedModels, config: TrainerBase, machine: Machine) -> None:
    """Check in a rank on a GPU that it fits, where the launcher could not know what the GPU has.

    Args:
        machine: as the rank sees it.

    Raises:
        UsageError: it does not fit.
    """
    for warning in check_rank(counted.needs(config, machine).rank, config, machine):
        logger.warning(warning)


def suggestion_of_replicas(
    counted: CountedModels, config: TrainerBase, machine: Machine, neighbours: int
) -> str | None:
    """What to tell somebody whose ranks gather each layer over the network between nodes, though those of
    each node could hold the whole model; None if there is one node, or they could not.

    Args:
        config: settled, with the number of workers.
        machine: one of the nodes, to which the others are taken to be equal.
        neighbours: ranks on each node.
    """
    nodes, rest = divmod(config.ranks, neighbours)
    if config.replicas > 1 or rest or nodes < 2 or not machine.has_gpus:
        return None
    need = counted.needs(config.model_copy(update={"replicas": nodes}), machine).rank
    if need.total > (has := min(gpu.memory for gpu in machine.gpus)):
        return None
    return (
        f"--replicas {nodes} would have each of the {nodes} nodes gather layers from its own GPUs only, and "
        f"nothing but gradients cross the network between them: a rank then needs about {gib(need.total)} of "
        f"the {gib(has)} of its GPU"
    )


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


_counted: dict[tuple[str, bytes, str], "Footprint"] = {}
"""Footprints of this process, by folder, its config.json, and how they were counted: a plan asks for the same
one several times, and each takes a second for 8 billion parameters."""


def count(folder: str, **how: Any) -> "Footprint":
    """The model's footprint; `how`: further arguments of `footprint_of`.

    Raises:
        Uncountable: the model can't be counted.
        UsageError: it can't have the attention that is asked for.
    """
    with importing():
        from cairn.trainer.models.footprint import footprint_of

    about = Path(folder) / "config.json"
    key = (folder, about.read_bytes() if about.is_file() else b"", repr(sorted(how.items())))
    if key in _counted:
        return _counted[key]
    try:
        _counted[key] = footprint_of(folder, **how)
        return _counted[key]
    except UsageError:
        raise
    except Exception as error:  # the model's own code, of any family
        reason = str(error).strip().partition("\n")[0]
        raise Uncountable(f"{folder}: {type(error).__name__}: {reason}") from None
