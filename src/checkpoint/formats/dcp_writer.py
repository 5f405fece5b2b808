"""Writes PyTorch distributed checkpoints (DCP) with torch's own writer, one tensor in memory at a time."""

# torch's planner is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex

from cairn.checkpoint.formats.content import Content, WriteOptions
from cairn.checkpoint.formats.outgoing import Outgoing, state_dict_of
from cairn.checkpoint.step import OPTIMIZER


def write(content: Content, folder: Path, options: WriteOptions) -> None:
    """Write `{"model": ..., "optim": {"state": ..., "param_groups": ...}, "step": ...}`.

    So do programs that save what torch's `get_state_dict` returns: weights have the names of transformers'
    modules, and tied ones are stored under each of their names.

    Raises:
        CheckpointError: there is no config.json.
        OSError: a file can't be written.
    """
    weights = state_dict_of(content, options.dtype)
    moments = content.tensors.get(OPTIMIZER, {})
    owners = dict.fromkeys(name.rpartition(".")[0] for name in moments)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    own = {name: Outgoing.of(source) for name, source in moments.items()}
    tensors |= {f"optim.state.{name}": source for name, source in own.items()}
    state: dict[str, Any] = {"model": {name: tensor.blank for name, tensor in weights.items()}}
    if own:
        by_owner: dict[str, dict[str, torch.Tensor]] = {name: {} for name in owners}
        for name, source in own.items():
            owner, _, what = name.rpartition(".")
            by_owner[owner][what] = source.blank
        shapes = {name: weights[name].shape for name in owners}
        state["optim"] = {"state": by_owner, "param_groups": _param_groups(shapes, content.settings)}
    if content.step is not None:
        state["step"] = content.step
    _save(folder, tensors, state, options.on_bytes)


def _param_groups(shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """AdamW's groups: one, or matrices and others where only matrices decay, as in Cairn."""
    decay = settings.get("optimizer.weight_decay") or 0.0
    known = {
        "lr": settings.get("optimizer.lr"),
        "betas": None if (betas := settings.get("optimizer.betas")) is None else tuple(betas),
        "eps": settings.get("optimizer.eps"),
        "initial_lr": settings.get("optimizer.lr"),
    }
    fixed = {
        **{"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False},
        **{"foreach": None, "fused": None, "decoupled_weight_decay": True},
    }
    matrices = [name for name, shape in shapes.items() if len(shape) >= 2 or not decay]
    others = [name for name in shapes if name not in set(matrices)]
    common = fixed | {name: value for name, value in known.items() if value is not None}
    groups = ((matrices, decay), (others, 0.0))
    if "optimizer.weight_decay" not in settings:  # what is not known is left out
        return [{"params": matrices, **common}]
    return [{"params": names, "weight_decay": own, **common} for names, own in groups if names]


class _Planner(DefaultSavePlanner):
    """Plans with blank tensors, and reads each when its turn comes to be written."""

    def __init__(self, tensors: Mapping[str, Outgoing], on_bytes: Callable[[int], None]):
        super().__init__()
        self._tensors = tensors
        self._on_bytes = on_bytes

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is stored under a key."""
        if index.fqn not in self._tensors:
            return super().lookup_object(index)
        whole = self._tensors[index.fqn].read()
        self._on_bytes(whole.nbytes)
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
