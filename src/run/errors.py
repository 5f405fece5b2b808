"""Errors whose message is all that a user needs; every command prints them without a traceback."""

import difflib
from collections.abc import Iterable
from typing import ClassVar


class CairnError(Exception):
    """Something went wrong that the message explains; a command ends with `exit_code`."""

    exit_code: ClassVar[int] = 1

    def to_launcher(self) -> str:
        """What a role that ends with this error sends its launcher."""
        return str(self)


class UsageError(CairnError):
    """The user asked for something that can't be done, and the message says what to do instead.

    A command ends with exit code 2. A role that raises it is not started again, and its launcher ends with
    the same message and exit code.
    """

    exit_code = 2


class OutOfMemory(CairnError):
    """A GPU's memory does not suffice for the settings, however often the run is tried."""


def one_of(wanted: object, choices: Iterable[str]) -> str:
    """A question that suggests the closest choice, or an empty string."""
    close = difflib.get_close_matches(str(wanted), list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
