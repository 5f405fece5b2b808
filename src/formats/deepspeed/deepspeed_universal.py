"""Reads universal checkpoints of DeepSpeed, which have a folder for each parameter."""

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content
from cairn.formats.deepspeed.deepspeed_files import STATES, UNIVERSAL
from cairn.formats.deepspeed.deepspeed_state import (
    ALLOWED,
    MOMENTS,
    ModelState,
    check_adamw,
    config_in,
    content_of,
    held_step,
    number_of_steps,
    renamed,
)
from cairn.formats.torch_file.saved_tensors import SavedTensor, read_file

MASTER = "fp32"
OPTIMIZER_STATE = "optimizer_state.pt"


def read_universal(folder: Path, model: Path | None) -> Content:
    """The content of a folder; see `DeepSpeed.read`.

    Args:
        model: the folder with config.json.
    """
    state = ModelState.read(_model_state(folder))
    shapes = {name: shape for group in state.shapes for name, shape in group.items()}
    path = folder / UNIVERSAL / OPTIMIZER_STATE
    common = read_file(path, ALLOWED)
    groups, given, clip = _common(path, common)
    for own in groups:
        check_adamw(path, MOMENTS, own, config_in(state.fields))
    weights: dict[str, TensorSource] = {}
    moments: dict[str, TensorSource] = {}
    for own in sorted((folder / UNIVERSAL).iterdir()):
        if not own.is_dir():
            continue
        name, shape = own.name, shapes.get(own.name)
        if name in state.shared:
            continue
        weights[name] = _tensor(own, MASTER, name, shape)
        kinds = sorted(file.stem for file in own.glob("*.pt") if file.stem != MASTER)
        if not kinds and shape is None:
            continue  # a buffer, or a parameter that is not trained
        check_adamw(own, kinds, {}, None)
        for kind in MOMENTS:
            moments[f"{name}.{kind}"] = _tensor(own, kind, f"{name}.{kind}", shape)
            if moments[f"{name}.{kind}"].spec.shape != weights[name].spec.shape:
                raise Damaged(f"{own / kind}.pt: has another shape than the weight")
        steps = read_file(own / "step.pt", ALLOWED) if "step" in kinds else given
        moments[f"{name}.step"] = held_step(name, number_of_steps(own, steps))
    if lacking := sorted(shapes.keys() - weights.keys()):
        raise FileNotFoundError(2, f"has no {lacking[0]}", str(folder / UNIVERSAL))
    return content_of(state, weights, moments, groups, clip, model)


def _model_state(folder: Path) -> Path:
    """The file of the model's state; with ZeRO 3 there is one of each rank, all with the same content here.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: there are several, of tensor parallelism.
    """
    found = [(match, path) for path in sorted(folder.iterdir()) if (match := STATES.fullmatch(path.name))]
    if strange := [path for match, path in found if int(match["mp"])]:
        raise CheckpointError(f"{strange[0]}: is of tensor parallelism; only data parallelism is imported")
    first = [path for match, path in found if match["what"] == "model" and not int(match["rank"] or 0)]
    if not first:
        raise FileNotFoundError(2, "holds no model_states.pt", str(folder))
    return first[0]


def _common(path: Path, common: Any) -> tuple[Sequence[Mapping[str, Any]], object, object]:
    """What the parameters have in common: settings of their groups, their step, and the norm of gradients.

    Raises:
        Damaged: the file is no such state.
    """
    try:
        inner = common.get("optimizer_state_dict")  # as ZeRO 3 has it
        groups = [dict(group) for group in (inner or common)["param_groups"]]
        state = inner["state"][0] if inner and inner.get("state") else {}
        step = state.get("step", groups[0].get("step", common.get("base_optimizer_state_step")))
        return groups, step, common.get("clip_grad")
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise Damaged(f"{path}: not an optimiser's state ({type(error).__name__}: {error})") from None


def _tensor(folder: Path, kind: str, name: str, shape: tuple[int, ...] | None) -> TensorSource:
    """A parameter's weights or moments: a tensor, flat after ZeRO 3, or a dictionary with one.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it has another size than the parameter.
        CheckpointError: it is of expert parallelism.
    """
    path = folder / f"{kind}.pt"
    found = read_file(path, ALLOWED)
    if isinstance(found, dict):
        if found.get("is_expert_param"):
            raise CheckpointError(f"{path}: has DeepSpeed's expert parallelism, which is not imported")
        found = found.get("param")
    tensor = SavedTensor.of(f"what {path} holds", found)
    shape = tensor.spec.shape if shape is None else shape
    if tensor.count != math.prod(shape) or (len(tensor.spec.shape) > 1 and tensor.spec.shape != shape):
        raise Damaged(f"{path}: has shape {list(tensor.spec.shape)} instead of {list(shape)}")
    return renamed(name, tensor, shape)
