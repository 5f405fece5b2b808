"""What every section of settings is made of."""

from typing import ClassVar

from pydantic import ConfigDict
from pydantic_config import BaseConfig as CheckedConfig  # pyright: ignore[reportMissingTypeStubs]


class BaseConfig(CheckedConfig):
    """Settings of known names with checked values. They never change: other values are another object."""

    model_config = ConfigDict(frozen=True)
    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that --help and hints leave out: only one value is allowed, or there is a newer name."""
