"""Settings of the guard against spikes of the gradient."""

from typing import Literal

from pydantic import Field

from cairn.config.base import BaseConfig


class SpikeConfig(BaseConfig):
    """A guard against single updates that would harm the model."""

    on_spike: Literal["off", "skip", "rewind"] = "off"
    """Gradients that spike or are not finite: skip them, or rewind a checkpoint; off: the latter end it."""
    grad_norm: float = Field(default=5.0, gt=1, allow_inf_nan=False)
    """A spike is a gradient norm above so many times its running mean."""
    loss: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """SFT: or a loss above so many times its running mean (default: the loss is not looked at)."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Weight of what was before in the running means; updates that were skipped are not in them."""
    warmup: int = Field(default=20, ge=1)
    """Updates that make up the means before any is skipped."""
    max_in_a_row: int = Field(default=5, ge=1)
    """The run ends when more updates in a row would be skipped, or more rewinds in a row go to one step."""
