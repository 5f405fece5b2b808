"""What is read from Python: a checkpoint, verified, and the records of a data set."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, Manifest
from cairn.checkpoint.step_folder import (
    MODEL,
    OPTIMIZER,
    ORCHESTRATOR_STATE,
    TRAINER_STATE,
    StepFolder,
    is_reward_model,
    verify,
)
from cairn.formats import FORMATS, TensorSource
from cairn.model.adapters import base_folder, is_adapter, with_adapter_merged
from cairn.run.data_sets import Records, every, load_records
from cairn.run.errors import UsageError
from cairn.run.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A step of which `load_checkpoint` has verified every byte.

    Tensors are read each time they are requested, on the CPU and in the data type of the file.
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.manifest.step

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The model's weights, by their names in the files, which are those of the hub.

        Those of a step that holds an adapter are the base's with the adapter added.
        """
        folder = StepFolder(self.folder).model
        try:
            return _read(FORMATS["peft" if is_adapter(folder) else "hf"].read(folder).tensors[MODEL])
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder}: {error.strerror}") from None

    @property
    def optimizer(self) -> "dict[str, dict[str, torch.Tensor]]":
        """The optimiser's state: by name of the weight, then by kind, such as `exp_avg`.

        Weights that never received a gradient have no state. Empty in a checkpoint of weights only.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in _read(StepFolder(self.folder).tensors(OPTIMIZER)).items():
            weight, _, kind = name.rpartition(".")
            state.setdefault(weight, {})[kind] = tensor
        return state

    @property
    def trainer_state(self) -> dict[str, Any]:
        """Progress, recipe, scheduler and data position of the trainer; empty if it holds weights only."""
        return read_json(self.folder / TRAINER_STATE, dict[str, Any]) or {}

    @property
    def orchestrator_state(self) -> dict[str, Any]:
        """Progress and recipe of the orchestrator; empty in SFT."""
        return read_json(self.folder / ORCHESTRATOR_STATE, dict[str, Any]) or {}

    def model(self, **arguments: Any) -> "PreTrainedModel":
        """The model, from `AutoModelForCausalLM.from_pretrained(folder, **arguments)`.

        A reward model is from `AutoModelForSequenceClassification`, and gives one number for a conversation.
        That of a step that holds an adapter is the base, in float32 unless `dtype` is given, with the adapter
        merged into it.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        folder = StepFolder(self.folder).model
        if is_reward_model(folder):
            return AutoModelForSequenceClassification.from_pretrained(folder, **arguments)
        if not is_adapter(folder):
            return AutoModelForCausalLM.from_pretrained(folder, **arguments)
        base = AutoModelForCausalLM.from_pretrained(base_folder(folder), **{"dtype": "float32", **arguments})
        return with_adapter_merged(base, folder)

    def tokenizer(self, **arguments: Any) -> "PreTrainedTokenizerBase":
        """The tokenizer with its chat template."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(StepFolder(self.folder).model, **arguments)


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Verify every byte of a `step_N` folder, and give access to its content.

    Raises:
        cairn.UsageError: there is no such folder, or it is not a checkpoint.
        cairn.CairnError: a file is missing or was changed; the message names file and position.
    """
    folder = Path(folder).absolute()
    if not (folder / FILE_NAME).exists():
        why = "there is no such folder" if not folder.is_dir() else f"not a checkpoint: it has no {FILE_NAME}"
        raise UsageError(f"{folder}: {why}; give the path of a step_N folder")
    return Checkpoint(folder, verify(folder))


def _read(stored: Mapping[str, TensorSource]) -> "dict[str, torch.Tensor]":
    from cairn.checkpoint.tensors.sharded_files import read_tensor

    return {name: read_tensor(tensor) for name, tensor in stored.items()}


@dataclass(frozen=True)
class _Source:
    name: str
    split: str
    csv_numbers: Sequence[str]
    split_setting: str = "split"
    part: None = None


class RecordSequence(Sequence[dict[str, Any]]):
    """The records of a data set in its order, each of which is read when it is asked for."""

    def __init__(self, records: Records):
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        numbers = range(len(self))[index]
        return self._records.read([numbers])[0] if isinstance(numbers, int) else self._records.read(numbers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return every(self._records)

    def where(self, index: int) -> str:
        """File and line of a record, or its number."""
        return self._records.where(index)


def read_records(
    path: str | os.PathLike[str], *, split: str = "train", csv_numbers: Sequence[str] = ()
) -> RecordSequence:
    """The records of a data set as a run trains on them: numbers as they are written, keys in their order.

    Args:
        path: a file, a folder, or a name on the hub, as `data.name`.
        split: as `data.split`.
        csv_numbers: as `data.csv_numbers`.

    Raises:
        cairn.CairnError: it can't be read; the message names file and line.
    """
    name = os.fspath(path)
    return RecordSequence(load_records(_Source(name, split, csv_numbers)))
