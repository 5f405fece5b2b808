"""Packages that only some formats need, in dependency groups of their own."""

import importlib
from typing import Any

from cairn.run.errors import UsageError


def needed(module: str, group: str) -> Any:
    """Import a module of an optional package.

    Args:
        group: the dependency group that has the package.

    Raises:
        UsageError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise UsageError(
            f"this format needs the package {error.name}, which is not installed; install it with: "
            f"uv sync --group {group}"
        ) from None
