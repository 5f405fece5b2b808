"""Writes PyTorch distributed checkpoints (DCP) with torch's own writer, one tensor in memory at a time."""

# torch's planner is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import AutoConfig, PreTrainedConfig

from cairn.checkpoint.dtypes import DTYPES
from cairn.checkpoint.formats.content import Content, Source, WriteOptions
from cairn.checkpoint.formats.fitting import in_memory
from cairn.checkpoint.formats.hub import hub_layout
from cairn.checkpoint.formats.huggingface import written_dtypes
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step import MODEL, OPTIMIZER
from cairn.checkpoint.streaming import pieces_of


def write(content: Content, folder: Path, options: WriteOptions) -> None:
    """Write `{"model": ..., "optim": {"state": ..., "param_groups": ...}, "step": ...}`.

    So do programs that save what torch's `get_state_dict` returns: weights have the names of transformers'
    modules, and tied ones are stored under each of their names.

    Raises:
        CheckpointError: there is no config.json.
        OSError: a file can't be written.
    """
    if content.model is None:
        raise CheckpointError("there is no config.json, which tells the names of the tensors in memory")
    config: PreTrainedConfig = AutoConfig.from_pretrained(content.model)
    layout = hub_layout(config)
    weights = in_memory(content.tensors[MODEL], layout, content.model)
    dtypes = written_dtypes(replace(content, tensors={MODEL: weights}), options.dtype)
    types = {name: dtypes.get(name, DTYPES[source.spec.dtype]) for name, source in weights.items()}
    for name, of in layout.tied_in_memory.items():
        weights[name], types[name] = weights[of], types[of]
    moments = content.tensors.get(OPTIMIZER, {})
    owners = dict.fromkeys(name.rpartition(".")[0] for name in moments)
    tensors = {f"model.{name}": _Outgoing(source, types[name]) for name, source in weights.items()}
    own = {name: _Outgoing(source, DTYPES[source.spec.dtype]) for name, source in moments.items()}
    tensors |= {f"optim.state.{name}": source for name, source in own.items()}
    state: dict[str, Any] = {"model": {name: tensors[f"model.{name}"].blank for name in weights}}
    if own:
        by_owner: dict[str, dict[str, torch.Tensor]] = {name: {} for name in owners}
        for name, source in own.items():
            owner, _, what = name.rpartition(".")
            by_owner[owner][what] = source.blank
        shapes = {name: weights[name].spec.shape for name in owners}
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


@dataclass(frozen=True)
class _Outgoing:
    """A tensor that is read when it is written. dtype: as which it is written."""

    source: Source
    dtype: torch.dtype

    @property
    def blank(self) -> torch.Tensor:
        """A tensor of this shape and data type without values."""
        return torch.empty(self.source.spec.shape, dtype=self.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """The tensor.

        Raises:
            Damaged: the source is invalid.
        """
        whole = torch.empty(self.source.spec.shape, dtype=self.dtype)
        flat, first = whole.view(-1), 0
        for piece in pieces_of(self.source):
            flat[first : first + len(piece)] = piece
            first += len(piece)
        return whole


class _Planner(DefaultSavePlanner):
    """Plans with blank tensors, and reads each when its turn comes to be written."""

    def __init__(self, tensors: Mapping[str, _Outgoing], on_bytes: Callable[[int], None]):
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
    folder: Path, tensors: Mapping[str, _Outgoing], state: Mapping[str, Any], on_bytes: Callable[[int], None]
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
