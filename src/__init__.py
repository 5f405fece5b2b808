"""Cairn: post-training for language models that never loses its place.

The names below are the public API (docs/reference/api.md). Their modules are imported when a name is first
used.
"""

import importlib
from typing import TYPE_CHECKING

from cairn.run.errors import CairnError, UsageError

if TYPE_CHECKING:
    from cairn.api.reading import Checkpoint, load_checkpoint, read_records
    from cairn.api.runs import Run, Step
    from cairn.api.training import dpo, reward, rl, sft
    from cairn.orchestrator.environments.tool_schemas import tool_schema

__version__ = "0.1.0"

__all__ = [
    "CairnError",
    "Checkpoint",
    "Run",
    "Step",
    "UsageError",
    "dpo",
    "load_checkpoint",
    "read_records",
    "reward",
    "rl",
    "sft",
    "tool_schema",
]

_HOMES = {
    "Checkpoint": "cairn.api.reading",
    "Run": "cairn.api.runs",
    "Step": "cairn.api.runs",
    "dpo": "cairn.api.training",
    "load_checkpoint": "cairn.api.reading",
    "read_records": "cairn.api.reading",
    "reward": "cairn.api.training",
    "rl": "cairn.api.training",
    "sft": "cairn.api.training",
    "tool_schema": "cairn.orchestrator.environments.tool_schemas",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
