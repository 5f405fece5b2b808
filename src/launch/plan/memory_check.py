"""Whether a run fits into a machine's memory: counts its model, which needs torch, and compares."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.tensors.remote_ranges import away_files
from cairn.config.inference import InferenceConfig
from cairn.config.teachers import START, is_served
from cairn.config.trainer import POLICY_AGAIN, TrainerBase
from cairn.launch.plan.memory_estimate import (
    Need,
    TrainedModel,
    check_rank,
    check_serving,
    check_training,
    host_need,
    rank_need,
    server_need,
    with_cache,
)
from cairn.run.errors import UsageError
from cairn.run.machine import Machine
from cairn.run.output import importing

if TYPE_CHECKING:
    from cairn.trainer.models.footprint import Footprint

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
        for name, one in config.models_beside.items()
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
    elements = _count(folder, compute="bfloat16", activation_checkpointing=False).elements
    return server_need(elements, dtype, tensor_parallel=config.tensor_parallel)


def refuse_what_does_not_fit(folder: str, config: TrainerBase, machine: Machine, flags: str) -> None:
    """Check before a run starts that its trainer fits; prints a warning where that is not certain.

    On CPUs a model is counted only if it might not fit, since counting takes seconds.

    Raises:
        UsageError: it does not fit.
    """
    ranks = config.ranks
    folders = [
        folder,
        *(folder if m.model == POLICY_AGAIN else m.model for m in config.models_beside.values()),
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
