"""What lists of steps show of each, in one object, so that many steps are listed with few requests.

It is derived from the manifests. A row has the ETag of the object with the manifest that it was made of, and
counts while the store lists that object with that ETag; where no row counts, the manifest is read instead.
"""

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.remote.client.objects import Objects
from cairn.run.object_store import RemoteError

logger = logging.getLogger(__name__)

CATALOG = "catalog.json"
LISTED = {"step", "branch", "created", "run_id", "attempt", "parent", "world_size", "parts"}
"""Fields of a manifest in a summary."""
LISTED_METRICS = ("loss", "reward/mean")
READS = 8
"""Manifests that are read at once."""
Read = Callable[[int], tuple[Manifest, str | None]]
"""Reads the manifest of a step; it comes with its object's ETag."""


def summary(manifest: Manifest) -> dict[str, Any]:
    """What lists of steps show of a manifest."""
    metrics = {name: manifest.metrics[name] for name in LISTED_METRICS if name in manifest.metrics}
    return {**manifest.model_dump(include=LISTED), "bytes": manifest.nbytes, "metrics": metrics}


def summaries(objects: Objects, steps: Mapping[int, str | None], read: Read) -> list[dict[str, Any]]:
    """The summaries of steps, oldest first.

    Args:
        steps: the steps, with the ETags that the store lists for their manifests.

    Raises:
        RemoteError: the object store refuses or fails.
        CheckpointError: a manifest that has to be read is damaged, or was deleted meanwhile.
    """
    rows = _valid(objects, steps)
    missing = sorted(steps.keys() - rows)
    with ThreadPoolExecutor(READS) as pool:
        rows |= dict(zip(missing, pool.map(partial(_row, read), missing), strict=True))
    return [{name: rows[step][name] for name in rows[step] if name != "etag"} for step in sorted(rows)]


def update(objects: Objects, steps: Mapping[int, str | None], read: Read) -> None:
    """Write the rows of these steps anew, and of no others; those of damaged steps are left out.

    An object store that fails is only logged: the steps exist without it.
    """
    try:
        rows = _valid(objects, steps)
        for step in sorted(steps.keys() - rows):
            try:
                rows[step] = _row(read, step)
            except CheckpointError as error:
                logger.warning("%s does not list step %d: %s", CATALOG, step, error)
        objects.put(CATALOG, json.dumps([rows[step] for step in sorted(rows)]).encode())
    except RemoteError as error:
        logger.warning("lists of steps will take longer: %s", error)


def _row(read: Read, step: int) -> dict[str, Any]:
    manifest, etag = read(step)
    return {**summary(manifest), "etag": etag}


def _valid(objects: Objects, steps: Mapping[int, str | None]) -> dict[int, dict[str, Any]]:
    """The rows that were made of the manifests that are there now."""
    try:
        rows = json.loads(objects.get(CATALOG) or b"[]")
        return {n: row for row in rows if (n := row["step"]) in steps and steps[n] == row["etag"] is not None}
    except (ValueError, TypeError, KeyError):
        return {}
