"""Settings of problems that rest, because they are too easy or too hard at the moment."""

from typing import Self

from pydantic import Field, model_validator

from cairn.config.base import BaseConfig


class PoolsConfig(BaseConfig):
    """Problems whose answers were all good, or all bad, are not asked for a while."""

    easy: float | None = Field(default=None, allow_inf_nan=False)
    """Mean reward from which on a problem is too easy and rests, such as 1.0 (default: none is)."""
    hard: float | None = Field(default=None, allow_inf_nan=False)
    """Mean reward up to which a problem is too hard and rests, such as 0.0 (default: none is)."""
    rest: int = Field(default=1, ge=1)
    """Epochs of its environment in which such a problem is not asked, before it is asked again."""
    window: int = Field(default=1, ge=1)
    """How often a problem must have been asked; the mean is that of as many times, the last ones."""

    @property
    def remembered(self) -> int:
        """How many of a problem's outcomes decide whether it rests; 0 if none ever does."""
        return 0 if self.easy is None and self.hard is None else self.window

    @model_validator(mode="after")
    def _hard_below_easy(self) -> Self:
        if self.easy is not None and self.hard is not None and self.hard >= self.easy:
            raise ValueError(
                f"pools.hard = {self.hard:g} is not below pools.easy = {self.easy:g}, so that every problem "
                "would rest: problems with a mean reward between the two are those that are asked"
            )
        return self
