"""A policy that comes as a low-rank adapter: the server adds it to the base, which it has on disk.

So a version is a few megabytes, whatever the size of the model. The server computes from merged weights.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.sharded_files import read_tensor
from cairn.formats import FORMATS, TensorSource
from cairn.formats.common.match_layout import weights_of
from cairn.inference.plugin.weight_files import UnusableWeights, identities
from cairn.model.adapters import Base, base_of_adapter, merged_weights
from cairn.model.hub_layout import Layout
from cairn.policy.checksums import checksum, read_checksums
from cairn.policy.errors import Altered


class Merging:
    """Merges adapters into their base, whose files are compared with their checksums once.

    Args:
        model: the folder that the server was started with; the base is looked for there first, since the
            trainer's folder may be on another machine.
    """

    def __init__(self, model: str):
        self._model = model
        self._compared: tuple[Base, Path, list[tuple[str, int, int]]] | None = None

    def sources(self, folder: Path, layout: Layout) -> dict[str, TensorSource]:
        """The merged weights of the adapter in `folder`, by the hub's names; nothing of the base is read yet.

        Raises:
            Altered: the adapter is not the one that the trainer wrote.
            Refused: the base is not here, or the adapter does not fit it.
        """
        published = read_checksums(folder) or {}
        stored = find_tensors(folder, "adapter_model")
        for name, expected in published.items():
            if name not in stored or checksum(read_tensor(stored[name])) != expected:
                raise Altered(
                    f"{folder}: tensor {name} is not the one that the trainer wrote (other checksum)"
                )
        try:
            base = self._base(folder)
            merged = merged_weights(folder, FORMATS["hf"].read(base).tensors[MODEL], layout)
            return weights_of(merged, layout, folder)
        except CheckpointError as error:
            raise UnusableWeights(str(error)) from None

    def _base(self, folder: Path) -> Path:
        record = base_of_adapter(folder)
        if record is None:
            raise CheckpointError(f"{folder}: does not say which base its adapter is of")
        if self._compared is not None:
            known, found, files = self._compared
            if known == record and identities(str(found)) == files:
                return found
        try:
            return self._compare(record, folder, record.find(folder, self._model))
        except CheckpointError:  # the server may have been started with any model of these shapes
            return self._compare(record, folder, record.find(folder))

    def _compare(self, record: Base, folder: Path, found: Path) -> Path:
        files = identities(str(found))
        record.check_files(found, folder)
        self._compared = record, found, files
        return found


def in_groups(sources: dict[str, TensorSource], groups: list[list[str]]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors, a group at a time."""
    for names in groups:
        yield {name: read_tensor(sources[name]) for name in names}
