"""What a trainer saves, and how it goes on from that."""

import hashlib
import importlib.metadata
import json
import platform
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cairn.checkpoint.arena import Tensors
from cairn.checkpoint.layout import find_tensors
from cairn.checkpoint.manifest import CheckpointError, Damaged, Origin
from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.saver import Saved, Saver
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import DTYPE_NAMES, load_step
from cairn.config.trainer import TrainerBase, TrainerConfig
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.files import read_json
from cairn.trainer.group import Group
from cairn.trainer.model import companions, weights, weights_in
from cairn.trainer.scoring import Scorer
from cairn.trainer.self_check import find_rows

PACKAGES = ("cairn", "torch", "transformers", "ray", "safetensors")


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
        saved = read_json(folder / "trainer" / "state.json")
        self.rows = saved.get("rows")
        optimizer = type(self.optimizer).__name__
        if saved.get("optimizer", optimizer) != optimizer:
            raise CheckpointError(
                f"{folder} has the state of {saved['optimizer']}, and this run uses {optimizer}"
            )
        self.progress = Progress(**saved["progress"])
        stateless = not list((folder / "trainer").glob("optimizer*.safetensors"))
        self._create_optimizer_state([] if stateless else find_tensors(folder / "trainer", "optimizer"))
        group = self.group
        try:
            tensors = {**self.tensors(), "model/model": weights_in(self.model, folder / "model")}
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
            return {"model/model": weights(self.model)}
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        }
        both = {"model/model": weights(self.model), "trainer/optimizer": optimizer}
        return {stem: tensors for stem, tensors in both.items() if tensors}


class TrainerCheckpoints:
    """Saves a trainer's state, off the training loop's critical path."""

    def __init__(
        self,
        state: TrainerState,
        store: CheckpointStore,
        attempt: Attempt,
        model_folder: Path,
        parent: Origin | None,
        recipe: dict[str, Any],
        run: RunDirectory,
    ):
        """Prepare to save.

        Args:
            model_folder: where the model's configuration and tokenizer come from.
            parent: the checkpoint that the run goes on from.
            recipe: the trainer's part of the run's, which every checkpoint keeps.
            run: whose rows are durable before a checkpoint of their step exists, and whose batches go after.
        """
        self.state = state
        self.store = store
        self.attempt = attempt
        self.parent = parent
        self.recipe = recipe
        self._companions = companions(state.model, model_folder) if state.group.rank == 0 else {}
        ckpt, group = state.config.ckpt, state.group
        if not ckpt.training_state:
            self._parts = ["model"]
        else:
            self._parts = ["trainer", *(["orchestrator"] if isinstance(state.config, TrainerConfig) else [])]

        def committed(step: int) -> None:
            run.forget_batches(step)
            apply_retention(store, ckpt)

        self._saver = Saver(
            store,
            rank=group.rank,
            world_size=group.world_size,
            session=group.gather_objects(secrets.token_hex(8))[0],
            roles={part: attempt.id for part in self._parts if part == "orchestrator"},
            part_timeout=ckpt.part_timeout,
            read_back=ckpt.verify == "save",
            before_commit=run.metrics.make_durable,
            after_commit=committed,
        )
        self.before_update = self._saver.before_update
        self.check = self._saver.check

    def others_saved(self, step: int) -> bool:
        """Whether the parts of the other roles for checkpoint `step` are there; the same on all ranks."""
        others = [part for part in self._parts if part == "orchestrator"]
        here = all(self.store.has_part(step, part, self.attempt.id) for part in others)
        return not self.state.group.any_of(not here)[0]

    def prepare(self) -> None:
        """Allocate what saving needs ahead of the first save; once the optimiser has its state."""
        if self.state.config.ckpt.interval or self.state.config.ckpt.interval_minutes:
            self._saver.prepare(self._tensors())

    def _tensors(self) -> Tensors:
        return self.state.tensors(weights_only=self._parts == ["model"])

    def save(self, metrics: dict[str, float], *, wait: bool) -> None:
        """Save the current step; all ranks call it. With `wait` it is committed when this returns."""
        state = self.state
        step = state.progress.step
        files = {f"model/{name}": content for name, content in self._companions.items()}
        tensors = self._tensors()
        if "trainer" in self._parts:
            trainer_state = {
                "progress": asdict(state.progress),
                "seed": state.config.seed,
                "rows": state.scorer.rows.name,
                "optimizer": type(state.optimizer).__name__,
                "scheduler": state.config.scheduler.model_dump(),
                "recipe": self.recipe,
            }
            files["trainer/state.json"] = (json.dumps(trainer_state, indent=2) + "\n").encode()
        self._saver.save(step, tensors, files, self._about(metrics, tensors))
        self.parent = Origin(run_id=self.attempt.run_id, step=step)
        if wait:
            self._saver.finish()

    def finish(self) -> list[Saved]:
        """Wait for the last save, and end; the saves completed since the last `check`."""
        self._saver.finish()
        saved = self._saver.check()
        self._saver.close()
        return saved

    def abandon(self) -> None:
        """End, and give up a save that is under way."""
        self._saver.abandon()

    def _about(self, metrics: dict[str, float], tensors: Tensors) -> dict[str, Any]:
        recipe = json.dumps({key: self.recipe[key] for key in sorted(self.recipe.keys() - {"changes"})})
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        return {
            "run_id": self.attempt.run_id,
            "attempt": self.attempt.number,
            "branch": self.attempt.branch,
            "parts": self._parts,
            "parent": self.parent,
            "world_size": self.state.group.world_size,
            "dtypes": {
                stem: "+".join(sorted({DTYPE_NAMES[tensor.dtype] for tensor in named.values()}))
                for stem, named in tensors.items()
            },
            "metrics": metrics,
            "versions": versions | {"python": platform.python_version()},
            "config_digest": hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest(),
        }
