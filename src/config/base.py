"""The base class of all sections of settings."""

from collections.abc import Sequence
from typing import ClassVar, cast

from pydantic import ConfigDict, field_validator
from pydantic_config import BaseConfig as CheckedConfig  # pyright: ignore[reportMissingTypeStubs]

from cairn.run.addresses import NO_CREDENTIALS, holds_credentials, is_url


class BaseConfig(CheckedConfig):
    """Settings with known names and checked values. Immutable: changed values are a new object."""

    # pydantic repeats what was given in its errors' own text, and that may hold a secret.
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)
    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that --help and hints leave out: they allow a single value, have a newer name, or are set by
    another setting."""

    @field_validator("*", mode="before")
    @classmethod
    def _without_credentials(cls, value: object) -> object:
        """Refuse the URL of an object store that holds credentials: settings are printed and stored."""
        texts = cast("list[object]", value) if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and is_url(text) and holds_credentials(text):
                raise ValueError(NO_CREDENTIALS)
        return cast("object", value)


def refuse_twins(what: str, key: str, names: Sequence[str]) -> None:
    """Check that no two of a list of sections have the same name.

    Args:
        what: the sections are, in the plural. key: the setting that names one.

    Raises:
        ValueError: two have the same.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what} are called {twice[0]!r}: give each a {key} of its own")
