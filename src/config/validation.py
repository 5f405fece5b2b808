"""Settings of validation: the loss of held-out records, which are never trained on."""

import os

from pydantic import Field, field_validator

from cairn.config.base import BaseConfig


class HeldOutDataConfig(BaseConfig):
    """Where held-out records are."""

    name: str
    """Like data.name: a file, a folder, or a name on the hub."""
    split: str = "train"
    """Split to validate on, or a slice of it such as train[95%:]; a single file has only train."""

    @field_validator("name")
    @classmethod
    def _absolute(cls, value: str) -> str:
        # Workers of a running Ray cluster have another current directory. A name on the hub stays as it is.
        return os.path.abspath(value) if value and os.path.exists(value) else value


class ValidationConfig(BaseConfig):
    """Records whose loss is measured at an interval."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Names the validation in evals.jsonl and metrics: letters, digits and _.- only."""
    data: HeldOutDataConfig | None = None
    """The records (default: those that data.held_out leaves out of training)."""
    interval: int = Field(default=50, ge=1)
    """Validate after every N steps."""
    at_start: bool = False
    """Also validate the model that the run starts from, as step 0."""
    at_end: bool = True
    """Also validate after the run's last step."""
    records: int | None = Field(default=None, ge=1)
    """Only the first N records (default: all)."""
    patience: int | None = Field(default=None, ge=1)
    """End the run when so many validations in a row, at the interval, have had no lower loss than before."""
