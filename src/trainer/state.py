"""What a trainer changes while it runs, and how it takes that up again from a checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cairn.checkpoint.arena import Tensors
from cairn.checkpoint.manifest import CheckpointError, Damaged, Origin
from cairn.checkpoint.step import MODEL, OPTIMIZER, TRAINER_STATE, StepFolder
from cairn.checkpoint.tensors import load_step
from cairn.config.trainer import TrainerBase
from cairn.trainer.group import Group
from cairn.trainer.model import weights, weights_in
from cairn.trainer.scoring import Scorer
from cairn.trainer.self_check import find_rows


@dataclass
class Progress:
    """How far the trainer has come: optimiser steps, tokens and samples trained on."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


@dataclass
class TrainerState:
    """All that a trainer changes while it runs.

    No random generator is among it: every draw is seeded from (run seed, purpose, step), which a resumed run
    seeds again (`cairn.run.seeds`).
    """

    config: TrainerBase
    group: Group
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    progress: Progress
    rows: str | None = None
    """How samples lay in rows in the loaded checkpoint's run."""

    @cached_property
    def scorer(self) -> Scorer:
        """What turns micro-batches into logprobs; all ranks must ask for it first at the same place."""
        return Scorer(self.model, self.group.device)

    def check_model(self) -> None:
        """Find out how samples must lie in rows, once the weights are loaded; all ranks call it.

        Raises:
            UsageError: the model can't be trained rightly.
        """
        self.scorer.rows = find_rows(
            self.scorer,
            self.group,
            compute=self.config.precision.compute,
            must_pass=self.config.self_check,
            first=self.rows,
        )

    def load(self, folder: Path) -> Origin:
        """Take everything from the checkpoint in `folder`; all ranks call it. Returns which one that was.

        Raises:
            CheckpointError: it holds other tensors than this run has.
            Damaged: a file is not as it was written.
        """
        step = StepFolder(folder)
        saved = step.trainer_state()
        if saved is None or not saved.progress:
            raise Damaged(f"{folder / TRAINER_STATE}: does not say how far the run had come")
        self.rows = saved.rows
        optimizer = type(self.optimizer).__name__
        if saved.optimizer not in (None, optimizer):
            raise CheckpointError(
                f"{folder} has the state of {saved.optimizer}, and this run uses {optimizer}"
            )
        self.progress = Progress(**saved.progress)
        self._create_optimizer_state(step.tensors(OPTIMIZER))
        group = self.group
        try:
            tensors = {**self.tensors(), MODEL: weights_in(self.model, step.model)}
        except FileNotFoundError as error:
            raise Damaged(f"{error.filename}: {error.strerror}") from None
        manifest = load_step(folder, tensors, rank=group.rank, gather=group.gather_objects)
        return Origin(run_id=manifest.run_id, step=manifest.step)

    def _create_optimizer_state(self, saved: Collection[str]) -> None:
        """Have the optimiser make the state whose names are in `saved`; loading then overwrites it.

        It does so in a step that changes nothing, for the parameters that had state when it was saved: one
        that never got a gradient has none.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        owners = {name.rpartition(".")[0] for name in saved}
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for name, parameter in self.model.named_parameters():
            if name in owners:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def tensors(self, *, weights_only: bool = False) -> Tensors:
        """Weights by name, and optimiser state as `<weight's name>.<what>`, such as `.exp_avg`."""
        if weights_only:
            return {MODEL: weights(self.model)}
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        }
        both = {MODEL: weights(self.model), OPTIMIZER: optimizer}
        return {stem: tensors for stem, tensors in both.items() if tensors}
