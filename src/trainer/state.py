"""What a trainer changes while it runs, and how it takes that up again from a checkpoint."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest, Origin
from cairn.checkpoint.memory.memory_owners import RankHost
from cairn.checkpoint.memory.memory_slots import record_of
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.step_folder import TRAINER_STATE, StepFolder
from cairn.checkpoint.tensors.sharded_files import Stored, load_step
from cairn.config.trainer import TrainerBase
from cairn.run.directory import RunDirectory
from cairn.run.history import Rewind
from cairn.run.messages import Attempt
from cairn.trainer.backends.backend import Backend, make_backend
from cairn.trainer.group import RankGroup
from cairn.trainer.models.trained import Trained
from cairn.trainer.router_aux_loss import Balance, coefficient_of
from cairn.trainer.scoring.self_check import check_scorer
from cairn.trainer.scoring.tokens import Scorer
from cairn.trainer.spikes import SpikeGuard

logger = logging.getLogger(__name__)

POLICY = "policy"
"""The name of the model that learns the task."""


@dataclass
class TrainerProgress:
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
    group: RankGroup
    models: dict[str, Trained]
    """By name. The policy is the one that learns the task; it is there in every run."""
    progress: TrainerProgress
    rows: str | None = None
    """How samples lay in rows in the loaded checkpoint's run."""
    position: dict[str, Any] | None = None
    """Where the batches go on, as the last one said; None if it said nothing."""
    validation: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """The best result of each validation."""
    rewinds: list[Rewind] = field(default_factory=list[Rewind])
    """When the run went back because of a spike, in order."""

    @cached_property
    def spikes(self) -> SpikeGuard:
        """What leaves out updates that would harm the model."""
        return SpikeGuard(self.config.spike)

    @property
    def policy(self) -> Trained:
        """The model that is served and published."""
        return self.models[POLICY]

    @cached_property
    def backend(self) -> Backend:
        """What computes the policy's gradients and changes its weights."""
        return make_backend(self.group)

    def backend_of(self, model: Trained) -> Backend:
        """The same for one of the models; FSDP2 has those beside the policy."""
        return self.backend if model is self.policy else self._beside

    @cached_property
    def _beside(self) -> Backend:
        group = self.group.beside
        return self.backend if group is self.group else make_backend(group)

    @cached_property
    def scorer(self) -> Scorer:
        """What turns micro-batches into logprobs; all ranks must ask for it first at the same place."""
        return self.policy.scorer(self.config, self.group.device)

    @cached_property
    def balance(self) -> Balance:
        """What keeps the experts of a mixture equally busy.

        Raises:
            UsageError: the run asks for that, and the model has no routers.
        """
        coefficient = coefficient_of(self.policy.module, self.config)
        group = self.group
        return Balance(self.policy.module, coefficient, group.context, group.tensor, kind=self.policy.kind)

    def check_model(self) -> None:
        """Find out how samples must lie in rows, once the weights are loaded; all ranks call it.

        Raises:
            UsageError: the model can't be trained rightly.
        """
        if self.balance.coefficient:
            logger.info("the experts' load is balanced: router_aux_coef = %g", self.balance.coefficient)
        with self.policy.proving():
            check_scorer(self.scorer, self.config, self.group, first=self.rows)

    def begin(self, folder: Path) -> None:
        """Take the weights that a run starts from, with the policy's in `folder`; all ranks call it.

        Raises:
            CheckpointError: they don't fit the models.
            Damaged: a file is damaged.
        """
        for model in self.models.values():
            model.begin(folder)

    def load(self, folder: Path) -> Origin | None:
        """Take everything from the checkpoint in `folder`; all ranks call it. Returns which one that was.

        Of a step in memory, it returns the checkpoint before it.

        Raises:
            CheckpointError: it holds other tensors than this run has.
            Damaged: a file is not as it was written.
        """
        step = StepFolder(folder)
        saved = step.trainer_state()
        if saved is None or not saved.progress:
            raise Damaged(f"{folder / TRAINER_STATE}: does not say how far the run had come")
        self.rows, self.position = saved.rows, saved.position
        optimizer = type(self.policy.optimizer).__name__
        if saved.optimizer not in (None, optimizer):
            raise CheckpointError(
                f"{folder} has the state of {saved.optimizer}, and this run uses {optimizer}"
            )
        self.progress = TrainerProgress(**saved.progress)
        self.spikes.restore(saved.spikes)
        self.validation = saved.validation or {}
        self.rewinds = [Rewind(**one) for one in saved.rewinds or []]
        manifest = self._read_tensors(step)
        if record := record_of(folder):
            return record.parent
        return Origin(run_id=manifest.run_id, step=manifest.step)

    def go_back(self, folder: Path) -> None:
        """Take weights and the optimisers' state from the checkpoint in `folder`, and keep all else.

        All ranks call it; no gradient is there. A parameter that had no state then has none now.

        Raises:
            CheckpointError: it holds other tensors than this run has, or is damaged.
        """
        for model in self.models.values():
            model.optimizer.state.clear()
        self._read_tensors(StepFolder(folder))

    def _read_tensors(self, step: StepFolder) -> Manifest:
        """Take the weights of all models, and the state of their optimisers, which have none yet."""
        folder, group = step.path, self.group
        tensors: dict[str, Mapping[str, Stored]] = {}
        for model in self.models.values():
            # What is gathered would hide the shards, and would be computed with again.
            self.backend_of(model).reshard(model.module)
            model.create_optimizer_state(step.tensors(model.optimizer_stem))
            tensors |= model.tensors()
            weights_folder = (folder / model.weights_stem).parent
            try:
                tensors[model.weights_stem] = model.loaded(weights_folder)
            except FileNotFoundError as error:
                raise Damaged(f"{error.filename}: {error.strerror}") from None
        self.backend.rest()  # the gradients' memory, which a server may want that shares the GPU
        manifest = load_step(folder, tensors, rank=group.rank, gather=group.gather_objects)
        for model in self.models.values():
            model.taken()
        return manifest

    def tensors(self, *, weights_only: bool = False) -> Tensors:
        """What a checkpoint holds, by file stem and name: of all models, or the policy's weights alone."""
        if weights_only:
            return {self.policy.weights_stem: self.policy.saved()}
        return {stem: named for model in self.models.values() for stem, named in model.tensors().items()}


@dataclass(frozen=True)
class Context:
    """What a task is given beside its configuration.

    state: with its weights loaded and its model checked. model_folder: the Hugging Face directory of the
    model's configuration and tokenizer. recipe: the trainer's part of the run's recipe. host: where this rank
    runs, if steps may be kept in memory there.
    """

    run: RunDirectory
    attempt: Attempt
    state: TrainerState
    model_folder: Path
    recipe: Mapping[str, Any]
    host: RankHost | None = None
