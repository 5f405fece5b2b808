"""What the files of DeepSpeed's engine hold beside tensors, checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content
from cairn.formats.common.adamw import MOMENTS, settings_of
from cairn.formats.common.tensor_views import TensorSection
from cairn.formats.deepspeed.deepspeed_files import STATES, UNIVERSAL
from cairn.formats.huggingface.hf_trainer_groups import STATE
from cairn.formats.torch_file.pickled import held_step, steps_in
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle, record
from cairn.formats.torch_file.torch_stream import MAX_VALUES, SavedTensor, read_file
from cairn.run.files import read_json

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false


def _stage(value: object = None, *_: object) -> int:
    if type(value) is not int or not 0 <= value <= 3:
        raise ForbiddenPickle(f"ZeRO has no stage {value!r}")
    return value


Fragment = record("fragment_address")
ALLOWED: Mapping[tuple[str, str], Any] = {
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): record("LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): record("DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _stage,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Fragment,
}
"""What the engine's files may name beside tensors, and what stands for it."""


@dataclass(frozen=True)
class HFTrainerProgress:
    """What is read of trainer_state.json, Trainer's file beside the engine's folder."""

    num_input_tokens_seen: int = 0


@dataclass(frozen=True)
class ModelState:
    """A `model_states.pt`.

    shapes: of the parameters that are trained, by name, group by group. module: the values that the engine
    holds whole. shared: the names of tied parameters, and of those that hold their values.
    """

    path: Path
    fields: Mapping[str, Any]
    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    module: Mapping[str, SavedTensor]
    shared: Mapping[str, str]
    buffers: Sequence[str]
    steps: int

    @classmethod
    def read(cls, path: Path) -> "ModelState":
        """The content of a file, checked.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: it is invalid.
            CheckpointError: the model is split over ranks in a way that Cairn does not put together.
        """
        fields = read_file(path, ALLOWED)
        try:
            _check_parallelism(path, fields)
            groups = fields["param_shapes"]
            if groups is None:
                raise CheckpointError(
                    f"{path}: was saved without ZeRO: its optimiser's state has no names. Import its weights "
                    f"alone with: ckpt import {path} RUN_DIR --format pt"
                )
            names = [name for group in groups for name in group]
            shapes = [dict(group) for group in groups]
            held = (fields["module"] or {}).items()
            module = {n: SavedTensor.of(n, v) for n, v in held if isinstance(v, SavedTensor)}
            shared = dict(fields.get("shared_params") or {})
            buffers = list(fields.get("buffer_names") or ())
            steps = fields["global_steps"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(
                f"{path}: not a model state of DeepSpeed ({type(error).__name__}: {error})"
            ) from None
        strings = (*names, *module, *shared, *shared.values(), *buffers)
        wrong = type(steps) is not int or steps < 0 or any(type(name) is not str for name in strings)
        if wrong or len(set(names)) != len(names):
            raise Damaged(f"{path}: not a model state of DeepSpeed")
        for group in shapes:
            _check_shapes(path, group)
        adapters = [name for name in names if "lora_" in name or "modules_to_save" in name]
        if adapters:
            raise CheckpointError(f"{path}: is of LoRA adapters, which are not imported: {adapters[0]}")
        return cls(path, fields, shapes, module, shared, buffers, steps)

    def frozen(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of parameters that are not trained, where the engine lists them."""
        found = _mapping(self.path, self.fields.get("frozen_param_shapes") or {})
        _check_shapes(self.path, found)
        return found

    def fragments(self) -> Mapping[str, SavedTensor]:
        """This rank's values of parameters that are not trained."""
        found = _mapping(self.path, self.fields.get("frozen_param_fragments") or {})
        return {name: SavedTensor.of(name, value) for name, value in found.items()}


def _check_parallelism(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuse models that are split over ranks by more than data parallelism."""
    degrees = fields.get("checkpoint_parallel_dimensions") or {}
    for size, what in (
        (fields.get("mp_world_size", 1), "tensor parallelism"),
        (degrees.get("tp_degree", 1), "tensor parallelism"),
        (degrees.get("pp_degree", 1), "pipeline parallelism"),
    ):
        if size != 1:
            raise CheckpointError(f"{path}: has {what} over {size} ranks; only data parallelism is imported")
    if fields.get("ds_autoep_layers") or fields.get("autoep_layers") or fields.get("num_experts"):
        raise CheckpointError(
            f"{path}: has DeepSpeed's expert parallelism; only data parallelism is imported"
        )


def _check_shapes(path: Path, shapes: Mapping[str, object]) -> None:
    for name, shape in shapes.items():
        if not isinstance(shape, tuple) or math.prod(shape) > MAX_VALUES:
            raise Damaged(f"{path}: {name} has an absurd shape")


def _mapping(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or any(type(key) is not str for key in value):
        raise Damaged(f"{path}: not a model state of DeepSpeed")
    return value


def check_adamw(path: Path, kinds: Sequence[str], group: Mapping[str, Any], config: object) -> None:
    """Refuse the state of other optimisers than AdamW.

    Args:
        kinds: what the state has of each weight. group: the settings of a group of parameters.
        config: that of the engine.

    Raises:
        CheckpointError: it is another one's.
    """
    if set(kinds) - {"step"} != set(MOMENTS):
        raise CheckpointError(f"{path}: has {', '.join(sorted(map(str, kinds)))}, not the state of AdamW")
    own = config.get("optimizer") if isinstance(config, dict) else None
    settings = own.get("params") if isinstance(own, dict) else None
    coupled = isinstance(settings, dict) and settings.get("adam_w_mode") is False
    if group.get("weight_decay") and coupled:
        raise CheckpointError(f"{path}: the optimiser is Adam with L2 decay; Cairn has AdamW only")
    if group.get("bias_correction") is False:
        raise CheckpointError(f"{path}: the optimiser is AdamW without bias correction, which Cairn has not")


def config_in(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The engine's configuration in what a file holds; empty if there is none."""
    config = fields.get("ds_config")
    return config if isinstance(config, dict) else {}


def content_of(
    state: ModelState,
    weights: dict[str, TensorSource],
    moments: Mapping[str, TensorSource],
    groups: Sequence[Mapping[str, Any]],
    clip: object,
    model: Path | None,
) -> Content:
    """The content of a checkpoint.

    Args:
        weights: all but those that share the values of others.
        groups: settings of the optimiser's groups. clip: the largest norm of gradients; 0 if unlimited.
        model: the folder with config.json.
    """
    named = {**weights, **{alias: weights[name] for alias, name in state.shared.items() if name in weights}}
    settings = settings_of(groups, state.path)
    if isinstance(clip, (int, float)) and clip > 0:
        settings["optimizer.max_grad_norm"] = clip
    samples = state.fields.get("global_samples")
    near = (state.path.parent / STATE, state.path.parent.parent / STATE)
    trainer = next((read_json(path, HFTrainerProgress) for path in near if path.is_file()), None)
    return Content(
        {MODEL: named, OPTIMIZER: moments},
        model=model,
        step=state.steps,
        tokens=trainer.num_input_tokens_seen or None if trainer else None,
        samples=samples if type(samples) is int and samples > 0 else None,
        optimizer="AdamW",
        settings=settings,
        left_out=tuple(_left_out(state)),
    )


def _left_out(state: ModelState) -> list[str]:
    """What is not taken over, one sentence each."""
    left_out = ["the position in the data: Cairn begins the data anew, in its own order"]
    if state.fields.get("lr_scheduler"):
        left_out.append(
            "lr_scheduler: Cairn's learning rate depends on the step alone: give it the same schedule"
        )
    if skipped := state.fields.get("skipped_steps"):
        left_out.append(
            f"skipped_steps: {skipped} of the {state.steps} steps changed nothing (overflow of fp16)"
        )
    return left_out


# Reads universal checkpoints of DeepSpeed, which have a folder for each parameter.


# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false


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
        moments[f"{name}.step"] = held_step(name, float(steps_in(steps, own)))
    if lacking := sorted(shapes.keys() - weights.keys()):
        raise FileNotFoundError(2, f"has no {lacking[0]}", str(folder / UNIVERSAL))
    return content_of(state, weights, moments, groups, clip, model)


def _model_state(folder: Path) -> Path:
    """The file of the model's state; with ZeRO 3 each rank has one, with the same content here."""
    found = [(match, path) for path in sorted(folder.iterdir()) if (match := STATES.fullmatch(path.name))]
    if strange := [path for match, path in found if int(match["mp"])]:
        raise CheckpointError(f"{strange[0]}: is of tensor parallelism; only data parallelism is imported")
    first = [path for match, path in found if match["what"] == "model" and not int(match["rank"] or 0)]
    if not first:
        raise FileNotFoundError(2, "holds no model_states.pt", str(folder))
    return first[0]


def _common(path: Path, common: Any) -> tuple[Sequence[Mapping[str, Any]], object, object]:
    """What the parameters have in common: settings of their groups, their step, and the norm of gradients."""
    try:
        inner = common.get("optimizer_state_dict")  # as ZeRO 3 has it
        groups = [dict(group) for group in (inner or common)["param_groups"]]
        state = inner["state"][0] if inner and inner.get("state") else {}
        step = state.get("step", groups[0].get("step", common.get("base_optimizer_state_step")))
        return groups, step, common.get("clip_grad")
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise Damaged(f"{path}: not an optimiser's state ({type(error).__name__}: {error})") from None


def _tensor(folder: Path, kind: str, name: str, shape: tuple[int, ...] | None) -> TensorSource:
    """A parameter's weights or moments: a tensor, flat after ZeRO 3, or a dictionary with one."""
    path = folder / f"{kind}.pt"
    found = read_file(path, ALLOWED)
    if isinstance(found, dict):
        if found.get("is_expert_param"):
            raise CheckpointError(f"{path}: has DeepSpeed's expert parallelism, which is not imported")
        found = found.get("param")
    tensor = SavedTensor.of(f"what {path} holds", found)
    shape = tensor.shape if shape is None else shape
    if tensor.size != math.prod(shape) or (len(tensor.shape) > 1 and tensor.shape != shape):
        raise Damaged(f"{path}: has shape {list(tensor.shape)} instead of {list(shape)}")
    return TensorSection(tensor, 0, TensorSpec(name, tensor.spec.dtype, shape))
