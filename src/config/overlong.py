"""Settings of answers that are too long."""

from typing import Literal

from pydantic import Field

from cairn.config.base import BaseConfig


class OverlongConfig(BaseConfig):
    """What becomes of answers that are cut off, or nearly."""

    type: Literal["learn", "mask", "shape"] = "learn"
    """learn: as all others; mask: nothing is learned from those cut off; shape: length lowers the reward."""
    buffer: int = Field(default=256, ge=1)
    """shape: tokens before sampling.max_tokens over which the punishment grows from 0."""
    penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """shape: what an answer that is cut off loses of its reward."""
