"""The base class of all sections of settings."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import ConfigDict
from pydantic_config import BaseConfig as CheckedConfig  # pyright: ignore[reportMissingTypeStubs]


class BaseConfig(CheckedConfig):
    """Settings with known names and checked values. Immutable: changed values are a new object."""

    model_config = ConfigDict(frozen=True)
    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that --help and hints leave out: they allow a single value, have a newer name, or are set by
    another setting."""


def refuse_twins(what: str, key: str, names: Sequence[str]) -> None:
    """Check that no two of a list of sections have the same name.

    Args:
        what: the sections are, in the plural. key: the setting that names one.

    Raises:
        ValueError: two have the same.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what} are called {twice[0]!r}: give each a {key} of its own")
