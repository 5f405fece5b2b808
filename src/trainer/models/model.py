"""The model: any Hugging Face causal language model, and the names that its weights have in files."""

import fnmatch
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.placement import Place, Stored, at_places
from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.config.trainer import TrainerBase
from cairn.formats import FORMATS
from cairn.model.described import FILE_NAME, about_model, carried_over, companion_files
from cairn.model.hub_layout import layout_of, tensors_in_memory, tied_apart
from cairn.model.untrusted_config import load_config, making_model
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import caps_attention, check_context
from cairn.trainer.backends.backend import CHECKS, make_backend
from cairn.trainer.backends.experts import check_experts
from cairn.trainer.group import RankGroup
from cairn.trainer.models.lora import adapt, plain
from cairn.trainer.router_replay import check_replay

logger = logging.getLogger(__name__)


def build_model(
    folder: Path,
    config: TrainerBase,
    group: RankGroup,
    remade: Callable[[PreTrainedModel], Any] = lambda model: model,
    *,
    held_as: torch.dtype = torch.float32,
    beside: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """The model that the Hugging Face directory `folder` describes; its weights are not yet loaded.

    Parameters are held in float32, as master weights must be, whatever the data type of the files; a model
    that is never trained may hold them as it computes, and the base of an adapter does. Weights get memory
    once the model is laid out, so that no rank ever holds all of it, neither on the host nor on its GPU.

    Args:
        remade: makes of the causal language model, on the meta device, what is trained.
        beside: a model of the same folder that is in memory, and has an adapter too: its frozen weights are
            shared, and take no further memory.

    Raises:
        UsageError: weights can't be shared as they are laid out.
    """
    about = load_config(folder)
    about._attn_implementation = None  # files may ask for one that mixes the samples of a micro-batch
    model = remade(_outline(about))
    if caps_attention(model) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")  # sdpa silently ignores the cap
    freeze(model, config.freeze)
    precision = config.precision.settled(gpu=group.device.type == "cuda")
    compute = DTYPES_IN_SETTINGS[precision.compute]
    if held_as != torch.float32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(held_as)
    if config.lora:
        adapt(model, config.lora)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(compute)
    if beside is not None:
        _share_frozen(model, beside)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = layers_of(model)
    if config.compile:
        for layer in layers:
            layer.compile()
    model = make_backend(group).lay_out(model, layers, config)
    _DESCRIBED[model] = about_model(folder)
    return model


def _share_frozen(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Have the frozen weights of `other` in the place of the model's own, which have no memory yet.

    Raises:
        UsageError: they are in shards, of which each model has its own.
    """
    if isinstance(other, FSDPModule):
        raise UsageError(
            "several adapters beside one base need precision.compute = 'float32' on one rank, where the base "
            "is not sharded"
        )
    held = {plain(name): p for name, p in other.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                module._parameters[key] = held[plain(f"{name}.{key}")]


_DESCRIBED: "weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Any]]" = weakref.WeakKeyDictionary()
"""The content of the config.json that each model was made from: the folder may be deleted during a run."""


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Have the parameters whose names match a pattern get no gradient; `*` matches dots, too.

    Raises:
        UsageError: a pattern matches no parameter, or all of them together leave none to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"freeze = {pattern!r} matches no weight of {type(model).__name__}; the names of its weights "
                f"are such as {names[0]} and {names[-1]}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"freeze = {list(patterns)} leaves no weight of {type(model).__name__} to train")


def check_parts(
    folder: Path, config: TrainerBase, remade: Callable[[PreTrainedModel], Any] = lambda model: model
) -> None:
    """Check settings by what the model in `folder` consists of; its weights are not read.

    Args:
        remade: as for `build_model`.

    Raises:
        UsageError: `freeze` names no weights, the backend can't train the model, ranks can't share its rows,
            matrices or experts, or recorded experts can't be replayed in it.
    """
    model = check_shared(folder, config, is_policy=True)
    check_context(model, config.parallel.context, config.parallel.tensor)
    if config.replays_experts:
        check_replay(model)
    freeze(remade(model), config.freeze)


def check_shared(folder: Path, config: TrainerBase, *, is_policy: bool = False) -> PreTrainedModel:
    """Check that the backend can lay out the model in `folder`, whose matrices or experts ranks may share.

    Args:
        is_policy: whether to refuse a model that has no experts to share, which others may lack.

    Returns:
        The model, without values.

    Raises:
        UsageError: it can't.
    """
    model = _outline(load_config(folder))
    layers = layers_of(model)
    CHECKS[config.backend](model, layers, config)
    check_experts(model, layers, config.parallel.expert, needed=is_policy)
    return model


def _outline(config: PreTrainedConfig) -> PreTrainedModel:
    """The model in training mode, its weights on the meta device, its buffers with their values.

    Buffers such as rotary frequencies are in no file. They are computed as in any model that is built on the
    CPU, since only parameters are replaced while it is built.
    """
    # The hook's type is declared as if it could only refuse.
    hook = register_module_parameter_registration_hook(_without_memory)  # pyright: ignore[reportArgumentType]
    try:
        with making_model(config), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
    finally:
        hook.remove()
    return model.train()


def _without_memory(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
) -> torch.nn.Parameter | None:
    """What a module gets instead of a new parameter; None leaves it as it is, such as one that is tied."""
    if parameter is None or parameter.is_meta:
        return None
    return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder layers, which transformers lists as modules not to be split; none is inside another."""
    names = set(model._no_split_modules or ())
    layers: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if type(module).__name__ in names and not inside:
            layers[name] = module
    return list(layers.values())


def weights(model: PreTrainedModel) -> Mapping[str, Stored]:
    """The weights (DTensors) by the hub's name; a tied weight stands once, as in saved models.

    They are the model's own tensors, and sections of those that are several tensors in a file.
    """
    return at_places(tensors_in_memory(model), layout_of(model).places)


def frozen_weights(model: PreTrainedModel) -> set[str]:
    """The weights that no step changes, by the hub's name."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name for name, place in layout_of(model).places.items() if place.name in frozen}


def published_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The data types of published weights, by the hub's name: `dtype`, but buffers stay as they are.

    The forward pass converts no buffers either; some models keep what chooses a token's experts in them.
    """
    buffers = {name for name, _ in model.named_buffers()}
    return {name: dtype for name, place in layout_of(model).places.items() if place.name not in buffers}


def config_of(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, bytes]:
    """The config.json of a folder that holds the model's weights as `dtype`."""
    return {FILE_NAME: carried_over(_DESCRIBED.get(model), model.config, dtype)}


def weights_in(model: PreTrainedModel, folder: Path) -> Mapping[str, Stored]:
    """The model's tensors, by the names that the files in `folder` give them, which may be older names.

    Tensors that the files hold and the model lacks, such as DeepSeek-V3's layer for multi-token prediction,
    are neither trained nor saved; a warning in the log names them.

    Raises:
        FileNotFoundError: there are no files.
        Damaged: a file is damaged.
    """
    return at_places(tensors_in_memory(model), places_in(model, folder))


def places_in(model: PreTrainedModel, folder: Path) -> dict[str, Place]:
    """The places in memory of the tensors in `folder`, by the names that its files give them.

    Raises:
        FileNotFoundError: there are no files.
        Damaged: a file is damaged.
        CheckpointError: the model ties two tensors, and the files hold different ones.
    """
    found = FORMATS["hf"].read(folder).tensors[MODEL]
    layout, stored = layout_of(model), found.keys()
    _, apart = tied_apart(found, layout)
    for name, of in apart.items():
        raise CheckpointError(
            f"{folder}: {name} differs from {of}, and config.json says that they are the same "
            "(tie_word_embeddings): set it to false there. As --model.name, the folder is corrected by itself"
        )
    places = layout.find(stored)
    if left_out := sorted(stored - places.keys() - layout.tied.keys()):
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        logger.warning(
            "%s: these tensors are not part of %s and are left out of checkpoints: %s%s",
            folder,
            type(model).__name__,
            ", ".join(left_out[:3]),
            more,
        )
    return places


def companions(model: PreTrainedModel, source: Path) -> dict[str, bytes]:
    """The other files of the Hugging Face directory `source`, by their paths in it.

    config.json says in which data type the weights are; apart from that it is as it was.
    """
    files = {name: path.read_bytes() for name, path in companion_files(source).items()}
    dtype = next(model.parameters()).dtype
    files[FILE_NAME] = carried_over(_DESCRIBED.get(model), model.config, dtype)
    return dict(sorted(files.items()))
