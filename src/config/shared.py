"""Settings that several commands have."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator

from cairn.config.base import BaseConfig
from cairn.config.ckpt import CkptConfig
from cairn.config.model import ModelConfig

if TYPE_CHECKING:
    from cairn.run.directory import RunDirectory


class CommandConfig(BaseConfig):
    """Settings that every command has."""

    model: ModelConfig = ModelConfig()
    dry_run: bool = False
    """Print the resolved configuration, what was chosen for this machine, and an estimate of memory; exit."""
    machine: str | None = None
    """With --dry-run: plan for another machine, such as 8x80G,1T (8 GPUs with 80 GiB, 1 TiB host memory)."""

    def settled(self, *, gpu: bool, gpu_servers: bool) -> Self:
        """With the values that settings left open have.

        Args:
            gpu: whether the trainer's ranks compute on GPUs.
            gpu_servers: whether vLLM does.
        """
        return self

    def left_to(self, **values: Any) -> Self:
        """With these values where none is set."""
        return self.model_copy(update={key: values[key] for key in values if getattr(self, key) is None})


class SharedConfig(CommandConfig):
    """Settings that the roles of a run share; in an RL run they are given once, for all roles."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random draws of the run."""
    max_steps: int = Field(default=100, ge=1)
    """Total optimiser steps of the run, including those before a resume."""
    output_dir: str = Field(default="outputs/rl", validate_default=True)
    """Run directory: everything that the run writes goes there."""
    ckpt: CkptConfig | None = None
    self_check: bool = True
    """Refuse a model whose logprobs differ alone, in micro-batches, or on the servers; off: train anyway."""

    @field_validator("output_dir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return os.path.abspath(value)

    def run_directory(self) -> "RunDirectory":
        """The run directory."""
        from cairn.run.directory import RunDirectory  # imports numpy, which would slow down --help

        return RunDirectory(Path(self.output_dir), self.ckpt.dir if self.ckpt else None)

    @property
    def validated_at(self) -> Mapping[str, int]:
        """By name, the interval of each validation."""
        return {}

    @property
    def patiences(self) -> Mapping[str, int]:
        """By name, the validations that may end the run early, with the patience of each."""
        return {}

    def sharing(self, **values: Any) -> Self:
        """A copy with other values, in every role that has these settings."""
        return self.model_copy(update=values)
