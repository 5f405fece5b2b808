"""Writes what programs with FSDP2 save as a PyTorch distributed checkpoint (DCP), made of a step of Cairn.

torch's own writer writes it, with one tensor in memory at a time.
"""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import AutoConfig, PreTrainedConfig

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import OPTIMIZER
from cairn.checkpoint.tensors.source import listed
from cairn.formats.base import Content, WriteOptions
from cairn.formats.common.adamw import rate_of
from cairn.formats.common.match_layout import Outgoing, state_dict_of
from cairn.formats.dcp.dcp_titan import expert_biases, in_rotary_order, titan_parts

Tree = dict[str, Any]
"""Nested dictionaries as a program has them, with an `Outgoing` for each tensor."""
FIXED = {
    **{"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False},
    **{"foreach": None, "fused": None, "decoupled_weight_decay": True},
}
"""What torch's AdamW has in each group of weights beside the run's settings."""


@dataclass(frozen=True)
class State:
    """What is written.

    weights: by transformers' names; tied ones are there under each of their names. moments: AdamW's state by
    the weight's name and kind. content: where they come from.
    """

    weights: Mapping[str, Outgoing]
    moments: Mapping[str, Mapping[str, Outgoing]]
    content: Content

    @property
    def step(self) -> int:
        """The step; 0 if there is none."""
        return self.content.step or 0


def plain(state: State) -> Tree:
    """A program that saves what torch's `get_state_dict` returns."""
    tree: Tree = {"model": dict(state.weights)}
    if state.moments:
        tree["optim"] = {"state": dict(state.moments), "param_groups": _groups_of_cairn(state)}
    if state.content.step is not None:
        tree["step"] = state.content.step
    return tree


def prime_rl(state: State) -> Tree:
    """prime-rl's trainer, with the schedule of a constant rate if that is Cairn's."""
    app: Tree = {"model": dict(state.weights)}
    if state.moments:
        group = _group(state, "prime-rl")
        app["optimizers"] = {
            "state": dict(state.moments),
            "param_groups": [{"params": list(state.moments), **group}],
        }
        if group["lr"] == group["initial_lr"]:
            app["scheduler"] = _schedule(
                state, group, lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            )
    app["progress"] = {
        "step": state.step,
        "total_tokens": state.content.tokens or 0,
        "total_samples": state.content.samples or 0,
    }
    return {"app": app}


def torchtitan(state: State) -> Tree:
    """torchtitan, with its own names, and the optimiser's settings by weight.

    Raises:
        CheckpointError: the model is not of a type for which the names are known.
    """
    if state.content.model is None:
        raise CheckpointError("there is no config.json, which tells the model's type")
    config: PreTrainedConfig = AutoConfig.from_pretrained(state.content.model)
    parts = titan_parts(state.weights, config)
    tree: Tree = {
        part.name: part.of(tensor)
        for name, tensor in _reordered(state.weights, config).items()
        for part in parts[name]
    }
    tree |= {key: torch.zeros(count) for key, count in expert_biases(config, tree).items()}
    if state.moments:
        flat = {f"{name}.{kind}": v for name, kinds in state.moments.items() for kind, v in kinds.items()}
        group = _group(state, "torchtitan")
        optimizer: Tree = {}
        for name, tensor in _reordered(flat, config).items():
            weight, _, kind = name.rpartition(".")
            for part in parts[weight]:
                optimizer[f"state.{part.name}.{kind}"] = tensor if kind == "step" else part.of(tensor)
        for part in (part for weight in state.moments for part in parts[weight]):
            optimizer |= {f"param_groups.{part.name}.{key}": value for key, value in group.items()}
        tree["optimizer"] = optimizer
        tree["lr_scheduler"] = _schedule(
            state, group, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        )
    tree["train_state"] = {"step": state.step, "ntokens_seen": state.content.tokens or 0}
    return tree


def _reordered(tensors: Mapping[str, Outgoing], config: PreTrainedConfig) -> dict[str, Outgoing]:
    """The same tensors, with the rows of queries and keys as torchtitan has them."""
    sources = {name: tensor.source for name, tensor in tensors.items()}
    ordered = in_rotary_order(sources, config, to_hub=False)
    return {name: Outgoing(source) for name, source in ordered.items()}


def _group(state: State, program: str) -> Tree:
    """AdamW's settings for a program with one group of weights."""
    settings, where = state.content.settings, state.content.model
    needed = [f"optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay")]
    if missing := [name for name in needed if settings.get(name) is None]:
        raise CheckpointError(f"{where}: the step does not say its {listed(missing)}, which {program} needs")
    return {**_settings(state), "weight_decay": float(settings["optimizer.weight_decay"])}


def _settings(state: State) -> Tree:
    """AdamW's settings that all weights share, as far as the step says them; the rate is the next step's."""
    settings = state.content.settings
    peak, betas = settings.get("optimizer.lr"), settings.get("optimizer.betas")
    known = {
        "lr": None if peak is None else rate_of(settings, state.step + 1),
        "betas": None if betas is None else tuple(betas),
        "eps": settings.get("optimizer.eps"),
        "initial_lr": peak,
    }
    return FIXED | {name: value for name, value in known.items() if value is not None}


def _groups_of_cairn(state: State) -> list[Tree]:
    """AdamW's groups: one, or matrices and others where only matrices decay, as in Cairn."""
    settings = state.content.settings
    decay = settings.get("optimizer.weight_decay") or 0.0
    shapes = {name: state.weights[name].shape for name in state.moments}
    matrices = [name for name, shape in shapes.items() if len(shape) >= 2 or not decay]
    others = [name for name in shapes if name not in set(matrices)]
    common = _settings(state)
    if "optimizer.weight_decay" not in settings:  # what is not known is left out
        return [{"params": matrices, **common}]
    groups = ((matrices, decay), (others, 0.0))
    return [{"params": names, "weight_decay": own, **common} for names, own in groups if names]


def _schedule(
    state: State,
    group: Mapping[str, Any],
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> Tree:
    """The state of a schedule of torch's at the next step."""
    weight = torch.nn.Parameter(torch.zeros(1))
    schedule = make(torch.optim.AdamW([weight], lr=float(group["initial_lr"])))
    schedule.last_epoch = state.step
    position = {"_step_count": state.step + 1, "_last_lr": [group["lr"]]}
    return {**schedule.state_dict(), **position}


LAYOUTS: dict[str, Callable[[State], Tree]] = {
    "dcp": plain,
    "prime-rl": prime_rl,
    "torchtitan": torchtitan,
}
"""By the name of the format."""


def write(content: Content, folder: Path, layout: str, options: WriteOptions) -> None:
    """Write what a program saves, which LAYOUTS names.

    Raises:
        CheckpointError: there is no config.json, or something has no counterpart in the program.
        OSError: a file can't be written.
    """
    moments: dict[str, dict[str, Outgoing]] = {}
    for name, source in content.tensors.get(OPTIMIZER, {}).items():
        owner, _, kind = name.rpartition(".")
        moments.setdefault(owner, {})[kind] = Outgoing(source)
    tree = LAYOUTS[layout](State(state_dict_of(content), moments, content))
    tensors: dict[str, Outgoing] = {}
    _save(folder, tensors, _blank(tree, "", tensors), options.on_bytes)


def _blank(tree: Any, key: str, tensors: dict[str, Outgoing]) -> Any:
    """The tree with a blank for each tensor; these are put into `tensors` by torch's key."""
    if isinstance(tree, Outgoing):
        tensors[key] = tree
        return tree.blank
    if isinstance(tree, dict):
        inner = cast("dict[str, Any]", tree)
        return {name: _blank(v, f"{key}.{name}" if key else name, tensors) for name, v in inner.items()}
    return tree


class ReadingPlanner(DefaultSavePlanner):
    """Reads a tensor when its turn comes to be written, and frees its values when the next one is read."""

    _last: torch.Tensor | None = None

    def read(self, tensor: Outgoing) -> torch.Tensor:
        """The whole tensor, until this is called again.

        Raises:
            Damaged: the source is invalid.
        """
        if self._last is not None:
            self._last.untyped_storage().resize_(0)  # torch's writer keeps all tensors to its end
        self._last = tensor.read()
        return self._last


class _Planner(ReadingPlanner):
    """Plans with blank tensors."""

    def __init__(self, tensors: Mapping[str, Outgoing], on_bytes: Callable[[int], None]):
        super().__init__()
        self._tensors = tensors
        self._on_bytes = on_bytes
        self._told: set[int] = set()

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._tensors:
            return super().lookup_object(index)
        tensor = self._tensors[index.fqn]
        whole = self.read(tensor)
        if id(tensor.source) not in self._told:  # a tied weight is written under each name
            self._told.add(id(tensor.source))
            self._on_bytes(tensor.source.spec.nbytes)
        return whole


def _save(
    folder: Path, tensors: Mapping[str, Outgoing], state: Mapping[str, Any], on_bytes: Callable[[int], None]
) -> None:
    """Write a checkpoint as a program of one rank does.

    Args:
        tensors: by key, such as `model.<name>`.
        state: nested as the program has it, with blanks where `tensors` are.
        on_bytes: called with the bytes of each tensor that was read.

    Raises:
        Damaged: a source is invalid.
        OSError: a file can't be written.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks is meant
        save(dict(state), storage_writer=writer, planner=_Planner(tensors, on_bytes), no_dist=True)
