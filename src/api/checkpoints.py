"""A checkpoint in memory: tensors that were compared with their checksums, and the state of the roles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.formats import FORMATS
from cairn.checkpoint.layout import StoredTensor
from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, Manifest
from cairn.checkpoint.step import MODEL, OPTIMIZER, ORCHESTRATOR_STATE, TRAINER_STATE, StepFolder
from cairn.checkpoint.store import verify
from cairn.run.errors import UsageError
from cairn.run.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Checkpoint:
    """A step whose every byte was as it was written when `load_checkpoint` looked.

    Tensors are read, on the CPU and in the data type in which they are stored, whenever they are asked for.
    """

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimiser steps that were done."""
        return self.manifest.step

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The model's weights by the names that its files give them, which are the hub's."""
        folder = StepFolder(self.folder).model
        try:
            return _read(FORMATS["hf"].read(folder).tensors[MODEL])
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder}: {error.strerror}") from None

    @property
    def optimizer(self) -> "dict[str, dict[str, torch.Tensor]]":
        """The optimiser's state by the name of the weight, then by kind, such as `exp_avg`.

        Weights that never received a gradient have none, nor has a checkpoint that holds weights only.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in _read(StepFolder(self.folder).tensors(OPTIMIZER)).items():
            weight, _, kind = name.rpartition(".")
            state.setdefault(weight, {})[kind] = tensor
        return state

    @property
    def trainer_state(self) -> dict[str, Any]:
        """Progress, recipe, scheduler and data position of the trainer; empty in one of weights only."""
        return read_json(self.folder / TRAINER_STATE, dict[str, Any]) or {}

    @property
    def orchestrator_state(self) -> dict[str, Any]:
        """Progress and recipe of the orchestrator; empty in SFT."""
        return read_json(self.folder / ORCHESTRATOR_STATE, dict[str, Any]) or {}

    def model(self, **arguments: Any) -> "PreTrainedModel":
        """The model, as `AutoModelForCausalLM.from_pretrained(folder, **arguments)` makes it."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(StepFolder(self.folder).model, **arguments)

    def tokenizer(self, **arguments: Any) -> "PreTrainedTokenizerBase":
        """The tokenizer with its chat template."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(StepFolder(self.folder).model, **arguments)


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Check a `step_N` folder byte by byte, and give access to what is in it.

    Raises:
        cairn.UsageError: there is no such folder, or it is no checkpoint.
        cairn.CairnError: a file is missing or changed; the message names the file and the place.
    """
    folder = Path(folder).absolute()
    if not (folder / FILE_NAME).exists():
        why = "there is no such folder" if not folder.is_dir() else f"no {FILE_NAME} in it, so no checkpoint"
        raise UsageError(f"{folder}: {why}; give the path of a step_N folder")
    return Checkpoint(folder, verify(folder))


def _read(stored: Mapping[str, StoredTensor]) -> "dict[str, torch.Tensor]":
    from cairn.checkpoint.tensors import read_tensor

    return {name: read_tensor(tensor) for name, tensor in stored.items()}
