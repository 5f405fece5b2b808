"""Writes PyTorch distributed checkpoints (DCP) with torch's own writer, one tensor in memory at a time."""

# torch's planner is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex

from cairn.checkpoint.step_folder import OPTIMIZER
from cairn.formats.base import Content, WriteOptions
from cairn.formats.common.outgoing import Outgoing, state_dict_of
from cairn.formats.dcp.dcp_layouts import LAYOUTS, State


def write(content: Content, folder: Path, layout: str, options: WriteOptions) -> None:
    """Write what a program saves, which `dcp_layouts.LAYOUTS` names.

    Raises:
        CheckpointError: there is no config.json, or something has no counterpart in the program.
        OSError: a file can't be written.
    """
    moments: dict[str, dict[str, Outgoing]] = {}
    for name, source in content.tensors.get(OPTIMIZER, {}).items():
        owner, _, kind = name.rpartition(".")
        moments.setdefault(owner, {})[kind] = Outgoing.of(source)
    tree = LAYOUTS[layout](State(state_dict_of(content, options.dtype), moments, content))
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
        """What is stored under a key."""
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
