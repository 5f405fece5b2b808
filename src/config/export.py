"""Settings of exports: checkpoints for other programs, written while training goes on."""

from typing import Literal

from pydantic import Field, field_validator

from cairn.config.base import BaseConfig
from cairn.run.machine import bytes_of


class ExportConfig(BaseConfig):
    """Saved steps written for other programs, too, by a process of its own while training goes on."""

    format: str = "hf"
    """Format to write, as of ckpt export --format."""
    interval: int | None = Field(default=None, ge=1)
    """Export the saved steps that are multiples of N, and the last one (default: every saved step)."""
    folder: str | None = None
    """Folder that holds the exported step_N folders (default: exports in the output folder)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights (default: as they are)."""
    quantize: str | None = None
    """Quantisation of the weights, in formats that have one, as of ckpt export --quantize."""
    shard_size: str | None = None
    """Largest size of a file of weights, such as 2G (default: 5G)."""
    keep: int | None = Field(default=None, ge=1)
    """Keep the newest N exports (default: all)."""
    max_waiting: int = Field(default=2, ge=0)
    """Steps that retention spares while they wait to be exported; further ones are given up."""
    verify: bool = True
    """Read each export back and compare it with the step."""

    @field_validator("shard_size")
    @classmethod
    def _a_size(cls, value: str | None) -> str | None:
        if value is not None:
            bytes_of(value)
        return value
