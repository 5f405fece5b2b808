"""Settings of the learning rate's schedule."""

import math
from typing import Literal

from pydantic import Field

from cairn.config.base import BaseConfig


class SchedulerConfig(BaseConfig):
    """Learning rate schedule: linear warm-up, then the chosen shape."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up to the peak learning rate."""
    steps: int | None = Field(default=None, ge=1)
    """Step at which linear and cosine reach their end (default: max_steps)."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a fraction of the peak."""

    def rate(self, step: int, peak: float, end: int) -> float:
        """The rate of optimiser step `step`, counted from 1; `end` is where linear and cosine arrive.

        It depends on nothing else, so a resumed run needs only its step.
        """
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        if self.type == "constant":
            return peak
        done = min((step - self.warmup_steps) / max(end - self.warmup_steps, 1), 1.0)
        fall = (1 + math.cos(math.pi * done)) / 2 if self.type == "cosine" else 1 - done
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)

    def end_in_words(self, max_steps: int, section: str) -> str | None:
        """What the user should know of the end of the schedule; None if it has none, or a later one."""
        end = self.steps or max_steps
        if self.type == "constant":
            return None
        falls = (
            f"{section}.type = {self.type}: the learning rate falls to {self.min_lr_ratio:g} of its peak at "
            f"step {end}"
        )
        if end < max_steps:
            still = "and learn nothing" if self.min_lr_ratio == 0 else "with this rate"
            return f"{falls}, and steps {end + 1} to {max_steps} go on {still}; raise {section}.steps"
        if end == max_steps:
            return f"{falls}, the last one ({section}.steps is another end, for a run that may go on)"
        return None  # somebody has chosen that

    def problem(self, max_steps: int, section: str) -> str | None:
        """Why no schedule of so many steps can be like this; None if one can."""
        end = self.steps or max_steps
        if self.type == "constant" or self.warmup_steps < end:
            return None
        return (
            f"{section}.warmup_steps = {self.warmup_steps} leaves no step for the {self.type} schedule, "
            f"which ends at step {end}; lower it or raise {section}.steps"
        )
