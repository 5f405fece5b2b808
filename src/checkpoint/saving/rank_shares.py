"""What one rank holds of the tensors of a step, and where in the step's files it belongs."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from cairn.checkpoint.tensors.layout import FileLayout
from cairn.checkpoint.tensors.placement import Section, Stored, local_values, share_of
from cairn.checkpoint.tensors.reader import as_bytes
from cairn.checkpoint.tensors.rows import RowTargets, in_rows
from cairn.checkpoint.tensors.sharded_files import plan_tensors

Tensors = Mapping[str, Mapping[str, Stored]]
"""Tensors by file stem within the step, such as `model/model`, and by name."""


class RankShares:
    """The bytes that one rank saves of every tensor, for all steps whose tensors have the same layout.

    A tensor is known as `stem:name`.

    Args:
        max_file_bytes: a larger set of tensors is split into files.
        constant: tensors that are left out, by stem.
    """

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        max_file_bytes: int,
        constant: Mapping[str, Collection[str]] = MappingProxyType({}),
    ):
        self.rank = rank
        self.layout = describe(tensors)
        self.files: list[FileLayout] = []
        """All files of the step with tensors in them, by their names within the step."""
        self.indices: dict[str, bytes] = {}
        """The content of the index files beside them, by name within the step."""
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        """What this rank saves of each tensor: first byte in the tensor, and number of bytes; ascending."""
        self._exchanged: set[str] = set()
        self._constant = constant
        self._owned: dict[tuple[str, int], tuple[int, int]] = {}
        """By tensor and number of local values: the first of those that this rank saves, and how many."""
        for stem, named in tensors.items():
            apart = constant.get(stem, ())
            files, index = plan_tensors(named, stem.rpartition("/")[2], max_file_bytes, apart=apart)
            own = [file for file in files if file.offsets.keys().isdisjoint(apart)]
            self.files += [inside(file, stem.rpartition("/")[0], stem) for file in own]
            if index is not None:
                self.indices[f"{stem}.safetensors.index.json"] = index
            rows = RowTargets({name: tensor for name, tensor in named.items() if name not in apart})
            self._exchanged |= {stem} if rows.exchanged else set()
            for name, tensor in rows.tensors.items():
                share = share_of(name, tensor, rank).owned()
                if share.ranges:
                    self.ranges[f"{stem}:{name}"] = share.byte_ranges()

    def take(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The bytes that this rank saves of each tensor, uint8, in the order of `ranges`.

        They share the tensors' memory, if those are contiguous. All ranks call it, on the thread that trains:
        some values may be exchanged.
        """
        tensors = {
            stem: in_rows({n: t for n, t in named.items() if n not in self._constant.get(stem, ())})
            if stem in self._exchanged
            else named
            for stem, named in tensors.items()
        }
        with torch.no_grad():
            return {
                key: self._bytes_of(key, name, tensors[stem][name])
                for key in self.ranges
                for stem, _, name in [key.partition(":")]
            }

    def _bytes_of(self, key: str, name: str, tensor: Stored) -> torch.Tensor:
        """The values that this rank saves of a tensor, uint8. Which ones these are is worked out once: a
        GPU stands still meanwhile, and a large model has thousands of tensors."""
        values = local_values(tensor.tensor if isinstance(tensor, Section) else tensor)
        if not values.is_contiguous():
            return as_bytes(share_of(name, tensor, self.rank).owned().local)
        first, count = self._owned.get((key, values.numel())) or (0, 0)
        if not count:
            own = share_of(name, tensor, self.rank).owned().local
            first = int(own.storage_offset()) - int(values.storage_offset())
            count = own.numel()
            self._owned[key, values.numel()] = first, count
        return as_bytes(values.view(-1)[first : first + count])


def describe(tensors: Tensors) -> list[tuple[str, str, torch.dtype, torch.Size]]:
    """The stems, names, data types and shapes of tensors, which decide how they are laid out."""
    return [(stem, name, t.dtype, t.shape) for stem, named in tensors.items() for name, t in named.items()]


def inside(file: FileLayout, folder: str, stem: str) -> FileLayout:
    """The same file with its path relative to the step's folder, and with the stem in its tensors' names."""
    offsets = {f"{stem}:{name}": offset for name, offset in file.offsets.items()}
    return FileLayout(f"{folder}/{file.name}", file.header, offsets, file.size)
