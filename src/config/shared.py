"""Settings that several commands have, each stated once."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator

from cairn.config.base import BaseConfig
from cairn.config.ckpt import CkptConfig
from cairn.config.model import ModelConfig

if TYPE_CHECKING:
    from cairn.run.directory import RunDirectory


class CommandConfig(BaseConfig):
    """What every command has."""

    model: ModelConfig = ModelConfig()
    dry_run: bool = False
    """Print the resolved configuration and exit."""


class SharedConfig(CommandConfig):
    """What the roles of a run share; in an RL run it is said once, for all of them."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random draw of the run."""
    max_steps: int = Field(default=100, ge=1)
    """Optimiser steps after which the run is done."""
    output_dir: str = Field(default="outputs/rl", validate_default=True)
    """Folder for everything that the run writes."""
    ckpt: CkptConfig | None = None
    self_check: bool = True
    """Refuse a model that scores samples otherwise alone, in micro-batches or on servers; false goes on."""

    @field_validator("output_dir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return os.path.abspath(value)

    def run_directory(self) -> "RunDirectory":
        """The directory of the run."""
        from cairn.run.directory import RunDirectory  # imports numpy, which --help has no time for

        return RunDirectory(Path(self.output_dir), self.ckpt.dir if self.ckpt else None)

    def sharing(self, **values: Any) -> Self:
        """The same with other values, for every role that has such settings."""
        return self.model_copy(update=values)
