"""What Trainer's checkpoints hold, and in which groups its optimiser has a model's weights."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.source import TensorSource
from cairn.model.untrusted_config import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""What Trainer finds in the names of weights without weight decay (`Trainer.get_decay_parameter_names`)."""


def groups_of(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The shapes of the weights by name, as they are in the two groups of Trainer's optimiser.

    Args:
        folder: has the model's config.json.

    Returns:
        Those that decay, and those that don't.
    """
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names

    model = _outline(folder)
    shapes = _shapes(model)
    decay = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    others = {name: shape for name, shape in shapes.items() if name not in decay}
    return {name: shape for name, shape in shapes.items() if name in decay}, others


def weights_in_order(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by name, in the order of `model.parameters()`; tied ones stand once.

    Args:
        folder: has the model's config.json.
    """
    return _shapes(_outline(folder))


def state_by_name(
    order: Mapping[str, tuple[int, ...]],
    numbers: Sequence[Any],
    states: Mapping[Any, Mapping[str, Any]],
    path: Path,
    misfit: Callable[[Any, list[int], str, list[int]], str],
) -> dict[str, TensorSource]:
    """The state of an optimiser that numbers weights, by their names.

    Args:
        order: the shapes of the weights by name, in the order in which the optimiser was given them.
        numbers: of the weights, in that order.
        states: as they are in the file `path`, by number.
        misfit: says what is wrong: the number and the shape of a state, the weight's name and shape.

    Raises:
        Damaged: a state is no tensor.
        CheckpointError: a state has another shape than its weight.
    """
    from cairn.formats.torch_file.pickled import source_of

    tensors: dict[str, TensorSource] = {}
    for number, (name, shape) in zip(numbers, order.items(), strict=True):
        for kind, value in sorted(states[number].items()):
            tensor = source_of(f"{name}.{kind}", value, path)
            if kind != "step" and tensor.spec.shape != shape:
                raise CheckpointError(misfit(number, list(tensor.spec.shape), name, list(shape)))
            tensors[f"{name}.{kind}"] = tensor
    return tensors


def _outline(folder: Path) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(folder))
    model.tie_weights()
    return model


def _shapes(model: "PreTrainedModel") -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def decaying_otherwise(
    decaying: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """The weights that decay in Trainer and not in Cairn, where matrices do, or the other way round."""
    vectors = [name for name, shape in decaying.items() if len(shape) < 2]
    return vectors + [name for name, shape in others.items() if len(shape) >= 2]
