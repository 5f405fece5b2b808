"""What lists of steps show of each, in one object, so that many steps are listed with few requests.

It is derived from the manifests: where it lacks a step, or can't be read, they are read instead.
"""

import json
from collections.abc import Collection
from typing import Any

from cairn.checkpoint.manifest import Manifest
from cairn.checkpoint.remote.objects import Objects

CATALOG = "catalog.json"
LISTED = {"step", "branch", "created", "run_id", "attempt", "parent", "world_size", "parts"}
"""Fields of a manifest in a summary."""
LISTED_METRICS = ("loss", "reward/mean")


def summary(manifest: Manifest) -> dict[str, Any]:
    """What lists of steps show of a manifest."""
    metrics = {name: manifest.metrics[name] for name in LISTED_METRICS if name in manifest.metrics}
    return {**manifest.model_dump(include=LISTED), "bytes": manifest.nbytes, "metrics": metrics}


def read(objects: Objects) -> dict[int, dict[str, Any]]:
    """The summaries that were written with earlier steps; empty if they can't be read."""
    try:
        rows = json.loads(objects.get(CATALOG) or b"[]")
        return {row["step"]: row for row in rows}
    except (ValueError, TypeError, KeyError):
        return {}


def add(objects: Objects, manifest: Manifest, steps: Collection[int]) -> None:
    """Add the summary of a step; of the others, those of `steps` stay."""
    rows = {step: row for step, row in read(objects).items() if step in steps}
    rows[manifest.step] = summary(manifest)
    objects.put(CATALOG, json.dumps([rows[step] for step in sorted(rows)]).encode())
