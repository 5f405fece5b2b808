"""The base class of all sections of settings."""

from typing import ClassVar

from pydantic import ConfigDict
from pydantic_config import BaseConfig as CheckedConfig  # pyright: ignore[reportMissingTypeStubs]


class BaseConfig(CheckedConfig):
    """Settings with known names and checked values. Immutable: changed values are a new object."""

    model_config = ConfigDict(frozen=True)
    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that --help and hints leave out: they allow a single value, have a newer name, or are set by
    another setting."""
