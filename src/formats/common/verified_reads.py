"""Verifies a step by the bytes that are read of it for an export, and the export by reading it back."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import torch
from transformers import AutoConfig

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.manifest import Damaged, check_content, check_files, holds_tensors, load_manifest
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.compression import check_tables
from cairn.checkpoint.tensors.layout import StoredTensor, TensorSpec
from cairn.checkpoint.tensors.reader import DTYPES, ReadRange, read_pieces
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.verified_copy import check_noted, noted
from cairn.formats.base import Content, Format, Stage, Verification
from cairn.formats.common.match_layout import state_of, weights_of
from cairn.model.hub_layout import hub_layout


class CheckedStep:
    """A step whose tensors are read once: their bytes are checksummed on the way, and compared at the end.

    Args:
        folder: the step. Its small files are verified now, and so are the sizes of all files.

    Raises:
        CheckpointError: the folder is not a checkpoint.
        Damaged: a file has another size, or a small file was changed.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._manifest = load_manifest(folder)
        self._lock = threading.Lock()
        self._seen: dict[Path, FileChecksum] = {}
        self._starts: dict[Path, int] = {}
        check_files(folder, self._manifest, tensors=False)
        check_tables(folder, self._manifest.contents)

    def watch(self, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """The same tensors; the values that are read of them count in `check`."""
        for tensor in tensors.values():
            if _is_plain(tensor):
                first = min(tensor.offset, self._starts.get(tensor.path, tensor.offset))
                self._starts[tensor.path] = first
        return {
            name: _Watched(self, tensor, tensor.spec) if _is_plain(tensor) else tensor
            for name, tensor in tensors.items()
        }

    def count(self, seen: Mapping[Path, FileChecksum]) -> None:
        with self._lock:
            for path, checksum in seen.items():
                self._seen.setdefault(path, FileChecksum(checksum.size)).merge(checksum)

    def check(self, stage: Stage) -> None:
        """Verify every file of which tensors were read; those that were read once, in full, not again.

        Files of tensors that `watch` did not see are verified, too.

        Raises:
            Damaged: a file was changed.
        """
        files = {name: entry for name, entry in self._manifest.files.items() if holds_tensors(name)}
        again = {
            name: entry
            for name, entry in files.items()
            if (path := self._folder / name) not in self._starts
            or (path in self._seen and not self._is_whole(path, entry.crc64nvme))
        }
        if again:
            on_bytes = stage(f"verifying {self._folder.name}", sum(entry.size for entry in again.values()))
            check_content(self._folder, again, on_bytes=on_bytes)

    def _is_whole(self, path: Path, crcs: list[str]) -> bool:
        """Whether each byte of a file was read once, and all of them are those of the manifest."""
        seen = self._seen[path]
        with open(path, "rb") as file:
            seen.add(0, file.read(self._starts[path]))
        return seen.nbytes == seen.size and [f"{crc:016x}" for crc in seen.chunks()] == crcs


def _is_plain(tensor: TensorSource) -> TypeGuard[StoredTensor]:
    """Whether the bytes of a tensor are those of a file that is here: not packed, and not away."""
    return isinstance(tensor, StoredTensor) and not (tensor.packed or tensor.away)


@dataclass(frozen=True)
class _Watched:
    """A tensor of a step; a `TensorSource`."""

    step: CheckedStep
    tensor: StoredTensor
    spec: TensorSpec

    def fill(self, first: int, into: torch.Tensor) -> None:
        dtype = dtype_of(self.tensor)
        piece = ReadRange(self.tensor.path, self.tensor.offset + first * dtype.itemsize, dtype, into)
        self.step.count(read_pieces([piece]))


class KeptValues:
    """A step whose values a format keeps bit for bit, in the data type asked for.

    content: the step's, converted. What is read of it is noted, so that the step is read once.
    """

    def __init__(self, content: Content, dtype: str | None):
        """Take the weights over as `dtype`, which is safetensors' name; None leaves each as it is."""
        dtypes = _written_dtypes(content, dtype)
        self._noted = {stem: noted(named, dtypes) for stem, named in content.tensors.items()}
        self.content = replace(content, tensors=self._noted)

    def read_back(self, reader: Format, folder: Path) -> Verification:
        """What reads everything that `reader` finds in `folder`, and compares it with what was taken over."""
        return lambda stage: self._compare(reader, folder, stage)

    def _compare(self, reader: Format, folder: Path, stage: Stage) -> str:
        back = reader.read(folder, self.content.model)
        for stem, named in self._noted.items():
            if stem not in back.tensors and any(source.was_read for source in named.values()):
                raise Damaged(f"{folder}: reading back found nothing of {stem}")
        for stem, named in back.tensors.items():
            found = self._as_in_step(named, stem, folder)
            progress = stage(f"comparing {stem}", sum(source.spec.nbytes for source in found.values()))
            check_noted(found, self._noted[stem], folder, on_bytes=progress)
        if back.step not in (None, self.content.step or 0):  # programs say 0 of weights that have no step
            raise Damaged(
                f"{folder}: says step {back.step}, but the checkpoint is of step {self.content.step}"
            )
        return "read back and equal"

    def _as_in_step(
        self, named: Mapping[str, TensorSource], stem: str, folder: Path
    ) -> Mapping[str, TensorSource]:
        """What was read back, by the names that a step uses.

        Raises:
            CheckpointError: something is missing, or does not fit the model.
        """
        model = self.content.model
        if named.keys() >= self._noted[stem].keys() or model is None:
            return named
        layout = hub_layout(AutoConfig.from_pretrained(model))  # pyright: ignore # typed in part
        return (weights_of if stem == MODEL else state_of)(named, layout, folder)


def _written_dtypes(content: Content, dtype: str | None) -> dict[str, torch.dtype]:
    """The data types of the weights that are converted, by name: buffers and whole numbers stay as they are.

    Args:
        content: that of a step, whose weights have the hub's names.
        dtype: safetensors' name of the data type that is asked for; None converts nothing.
    """
    if dtype is None or content.model is None:
        return {}
    weights = content.tensors[MODEL]
    layout = hub_layout(AutoConfig.from_pretrained(content.model))  # pyright: ignore # typed in part
    return {
        name: DTYPES[dtype]
        for name, place in layout.find(weights.keys()).items()
        if name in weights and dtype_of(weights[name]).is_floating_point and place.name not in layout.buffers
    }
