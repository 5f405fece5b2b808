"""What runs are made of, drawn from tables, so that not all tests meet the one family and the one signal.

A draw depends on the name that is given for it and on nothing else: a test meets the same every time.
"""

import zlib
from collections.abc import Sequence
from typing import TypeVar

from cairn.run.signals import STOP_SIGNALS

T = TypeVar("T")

FAMILIES = ("llama", "qwen2", "mistral", "gemma", "phi3", "olmo2", "granite", "gpt_neox", "starcoder2")
"""Of the table in families.py, those that train in packed rows of any length and are dense."""


def drawn(table: Sequence[T], name: str) -> T:
    """The entry of `table` that belongs to `name`, such as a test module's."""
    return table[zlib.crc32(name.encode()) % len(table)]


def family(name: str) -> str:
    """A model family."""
    return drawn(FAMILIES, name)


def stop_signal(name: str) -> int:
    """One of the signals that ask a run to stop."""
    return drawn(STOP_SIGNALS, name)
