"""A model that is trained, with its optimiser, and where both lie in a checkpoint."""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.saving.unchanged_files import Carried
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.sharded_files import Stored, read_tensors
from cairn.config.trainer import TrainerBase
from cairn.run.errors import UsageError
from cairn.trainer.models.model import (
    config_of,
    frozen_weights,
    published_dtypes,
    weights,
    weights_in,
)
from cairn.trainer.scoring.tokens import Scorer, make_scorer


class Trained:
    """A model of which all weights are trained.

    Which tensors are loaded, trained, saved and served are four questions, and a subclass may answer each in
    its own way: an adapter, for one, is trained beside weights that are loaded and never saved.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        *,
        weights_stem: str = MODEL,
        optimizer_stem: str = OPTIMIZER,
    ):
        """Take an optimiser of `trained()`.

        Args:
            weights_stem: of the files of weights within a step; it ends in model.
            optimizer_stem: of the files of optimiser state.
        """
        self.module = module
        self.optimizer = optimizer
        self.weights_stem = weights_stem
        self.optimizer_stem = optimizer_stem

    saves_served: ClassVar[bool] = True
    """Whether checkpoints hold what servers get."""
    served_stem: ClassVar[str] = "model"
    """Of the files in which servers get it."""

    @property
    def kind(self) -> type[torch.nn.Module]:
        """transformers' class of the model, or one that extends it."""
        return type(self.module)

    def begin(self, folder: Path) -> None:
        """Take the weights that a run starts from; the policy's are in `folder`. All ranks call it."""
        read_tensors(folder, self.loaded(folder), "model")

    def taken(self) -> None:
        """All of `tensors` has been read. All ranks call it.

        Raises:
            CheckpointError: it is not what the model can go on from.
        """

    def loaded(self, folder: Path) -> Mapping[str, Stored]:
        """What is read from the weights in a folder, by the names that they have there.

        Raises:
            FileNotFoundError: there are no files.
            Damaged: a file is damaged.
        """
        return weights_in(self.module, folder)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What the optimiser changes, by the model's own names."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def saved(self) -> Mapping[str, Stored]:
        """What checkpoints hold, by the hub's names."""
        return weights(self.module)

    def beside(self) -> Mapping[str, bytes]:
        """Files that checkpoints hold beside the weights and the files of the model's folder."""
        return {}

    def carried(self) -> Mapping[str, Carried]:
        """Files that checkpoints take over as they are, by name within the step."""
        return {}

    def constant(self) -> Collection[str]:
        """The names in `saved` whose values no step changes."""
        return frozen_weights(self.module)

    def scorer(self, config: TrainerBase, device: torch.device) -> Scorer:
        """What turns micro-batches into the numbers that losses are computed of; all ranks call it."""
        return make_scorer(self.module, config, device)

    def as_begun(self, folder: Path) -> contextlib.AbstractContextManager[None] | None:
        """A context in which the model computes with the weights in `folder`; None if it has others."""
        return None

    def proving(self) -> contextlib.AbstractContextManager[None]:
        """The context of the passes in which the loaded model is checked before it is trained.

        Its end may raise UsageError, if they have shown that what is to be trained has no part in them.
        """
        return contextlib.nullcontext()

    def served(self) -> Mapping[str, Stored]:
        """What servers get, by the hub's names."""
        return weights(self.module)

    def served_as(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """The data types in which servers get it, when weights are published as `dtype`."""
        return published_dtypes(self.module, dtype)

    def served_with(self, dtype: torch.dtype) -> Mapping[str, bytes]:
        """The files that make it a Hugging Face directory."""
        return config_of(self.module, dtype)

    def tensors(self) -> Tensors:
        """All that a checkpoint holds of it: weights, and state as `<parameter's name>.<what>`.

        Raises:
            UsageError: something in the optimiser's state can't be saved.
        """
        state = state_of(self.optimizer, self.trained())
        both = {self.weights_stem: self.saved(), self.optimizer_stem: state}
        return {stem: tensors for stem, tensors in both.items() if tensors}

    def create_optimizer_state(self, saved: Collection[str]) -> None:
        """Have the optimiser make the state whose names are in `saved`, for loading to overwrite.

        It does so in steps that change nothing, one for each parameter that had state when it was saved: one
        that never got a gradient has none. All ranks call it.

        Raises:
            CheckpointError: a parameter had state that is frozen now.
        """
        owners = {name.rpartition(".")[0] for name in saved}
        if lost := [n for n, p in self.module.named_parameters() if n in owners and not p.requires_grad]:
            raise CheckpointError(
                f"{lost[0]} and {len(lost) - 1} more weights are frozen here, and were trained before: the "
                "checkpoint has optimiser state of them. Freeze what its run froze, or start a new run from "
                "its weights: --model.name STEP"
            )
        having = {parameter for name, parameter in self.module.named_parameters() if name in owners}
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        for group in groups:
            group |= {"lr": 0.0, "params": []}
        # One parameter at a time: a server that shares the GPU leaves no memory for gradients of all of them.
        for group, whole in zip(groups, before, strict=True):
            for parameter in (parameter for parameter in whole["params"] if parameter in having):
                group["params"] = [parameter]
                parameter.grad = torch.zeros_like(parameter)
                self.optimizer.step()
                parameter.grad = None
            group["params"] = []
        for group, whole in zip(groups, before, strict=True):
            group |= whole


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The state of all parameters, as `<parameter's name>.<what>`: numbers, and tensors placed as the weight.

    Raises:
        UsageError: something in the state is no plain tensor, so that a resumed run would be without it.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if problem := _problem(value, parameter):
                raise UsageError(
                    f"{type(optimizer).__name__} can't be saved: its state {key!r} of {name} {problem}. "
                    "Checkpoints hold numbers as tensors of shape [], and tensors of a weight's own shape "
                    "and sharding, as torch.zeros_like(parameter) makes them"
                )
            if value is not None:
                found[f"{name}.{key}"] = value
    return found


def _problem(value: Any, parameter: torch.nn.Parameter) -> str | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return f"is of type {type(value).__name__}, not a tensor"
    plain = value.to_local() if isinstance(value, DTensor) else value
    if type(plain) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(plain).__name__}, whose bytes are not its values"
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim:
        return "is a rank's own piece, which says nothing of its place in the whole"
    return None
