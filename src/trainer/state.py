"""The trainer's part of a checkpoint."""

import hashlib
import importlib.metadata
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cairn.checkpoint.manifest import Origin
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import DTYPE_NAMES, read_tensors, write_tensors
from cairn.config.trainer import TrainerBase, TrainerConfig
from cairn.run.directory import Attempt
from cairn.run.files import read_json, write_json
from cairn.trainer.group import Group
from cairn.trainer.model import weights, write_companions

PACKAGES = ("cairn", "torch", "transformers", "ray", "safetensors")


@dataclass
class Progress:
    """How far the trainer has come: optimiser steps, tokens and samples trained on."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


@dataclass
class TrainerState:
    """All that a trainer changes while it runs, and how to save and load it.

    No random generator is among it: every draw is seeded from (run seed, purpose, step), which a resumed run
    seeds again (`cairn.run.seeds`).
    """

    config: TrainerBase
    attempt: Attempt
    group: Group
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    progress: Progress
    model_folder: Path
    """The Hugging Face directory that the model's configuration and tokenizer come from."""
    parent: Origin | None = None
    """The checkpoint before the one to be saved."""

    def save(self, store: CheckpointStore, metrics: dict[str, float]) -> float:
        """Save a checkpoint of the current step and commit it; all ranks call it. Returns seconds taken."""
        started = time.monotonic()
        step, group = self.progress.step, self.group
        if group.rank == 0:
            store.begin_part(step, ["model", "trainer"])
        group.barrier()
        folder = store.folder(step)
        places = {"rank": group.rank, "barrier": group.barrier}
        tensors = weights(self.model)
        write_tensors(folder / "model", tensors, "model", **places)
        write_tensors(folder / "trainer", self._optimizer_tensors(), "optimizer", **places)
        if group.rank == 0:
            write_companions(self.model, self.model_folder, folder / "model")
            write_json(
                folder / "trainer" / "state.json",
                {
                    "progress": asdict(self.progress),
                    "seed": self.config.seed,
                    "optimizer": type(self.optimizer).__name__,
                    "scheduler": self.config.scheduler.model_dump(),
                },
            )
            store.finish_part(step, "trainer", ["model", "trainer"], self.attempt.id)
            parts = ["trainer", "orchestrator"] if isinstance(self.config, TrainerConfig) else ["trainer"]
            manifest = store.commit(
                step,
                parts,
                self.attempt.id,
                timeout=self.config.ckpt.part_timeout,
                about=self._about(metrics, {DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()}),
            )
            self.parent = Origin(run_id=manifest.run_id, step=manifest.step)
        return time.monotonic() - started

    def load(self, folder: Path) -> None:
        """Take optimiser state and progress from the step_N `folder`; the weights are loaded already."""
        saved = read_json(folder / "trainer" / "state.json")
        self.progress = Progress(**saved["progress"])
        self._create_optimizer_state()
        read_tensors(folder / "trainer", self._optimizer_tensors(), "optimizer")

    def _create_optimizer_state(self) -> None:
        """Have the optimiser make its state, with a step that changes nothing; loading then overwrites it."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Optimiser state by parameter name, such as `model.norm.weight.exp_avg`."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        }

    def _about(self, metrics: dict[str, float], dtypes: set[str]) -> dict:
        config = self.config.model_dump_json(exclude={"ckpt", "max_steps"})
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        return {
            "run_id": self.attempt.run_id,
            "attempt": self.attempt.number,
            "parent": self.parent,
            "world_size": self.group.world_size,
            "dtypes": {"model": "+".join(sorted(dtypes)), "optimizer": "F32"},
            "metrics": metrics,
            "versions": versions | {"python": platform.python_version()},
            "config_digest": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        }
