"""Classes that a configuration names: one of Cairn's own, or `module:Class` of the user's.

Environments, advantages and losses are found this way. `module` is imported like any other, so that it has to
be installed or on the path of Python modules; the folder that a command is run in is there with PYTHONPATH=.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cairn.run.errors import UsageError

T = TypeVar("T")


class BadExtension(UsageError):
    """A configured class can't be found or made; the message names the setting, its value and the remedy."""


def load(name: str, built_in: Mapping[str, Callable[..., T]], setting: str) -> Callable[..., T]:
    """The class that the configuration calls `name`: a key of `built_in`, or `module:Class`.

    Args:
        setting: the dotted name of the setting that holds `name`, as messages show it, such as
            orchestrator.environment.name.

    Raises:
        BadExtension: there is none of that name, or it can't be imported.
    """
    if name in built_in:
        return built_in[name]
    about = f"{setting} = {name!r}"
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise BadExtension(f"{about}: not one of {', '.join(built_in)}, nor module:Class")
    try:
        found: Callable[..., T] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or module
        hint = ""
        if module == missing or module.startswith(f"{missing}."):
            hint = "; to import it from the current folder, set PYTHONPATH=. for the command"
        raise BadExtension(f"{about}: {error}{hint}") from error
    except Exception as error:  # the user's own code
        what = str(error) if isinstance(error, ImportError | AttributeError) else repr(error)
        raise BadExtension(f"{about}: {what}") from error
    if not callable(found):
        raise BadExtension(f"{about}: it is no class, but of type {type(found).__name__}")
    return found


def make(cls: Callable[..., T], arguments: Mapping[str, Any], setting: str) -> T:
    """An object of a class that `load` returned.

    Args:
        arguments: the keyword arguments that the configuration has for its constructor.
        setting: the dotted name of the setting that holds them, as messages show it.

    Raises:
        BadExtension: the class does not take them, or fails.
    """
    try:
        return cls(**arguments)
    except Exception as error:  # the user's own code
        what = str(error) if isinstance(error, TypeError | ValueError) else repr(error)
        raise BadExtension(f"{setting} = {dict(arguments)}: {what}") from error
