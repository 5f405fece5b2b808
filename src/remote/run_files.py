"""The small files of a run in its object store: metrics, history, evaluations, pins, ratings, the catalog.

`run/NAME` is the newest copy of each, and `run/earlier/NAME` the one before. `run/sums.json` has size and
CRC-64/NVME of both: it is put before the object that it describes, so that an object which is in none of its
lines is not what was uploaded. Prefixes of earlier versions of Cairn have neither sums nor earlier copies.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import crc64
from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.remote.client.objects import Objects
from cairn.run.files import parse_json
from cairn.run.object_store import RemoteError

logger = logging.getLogger(__name__)

FOLDER = "run"
EARLIER = f"{FOLDER}/earlier"
SUMS = f"{FOLDER}/sums.json"
KEPT_SUMS = 4
"""So many sums of each file: those of the copies that are there, and of one that an upload was cut off at."""


@dataclass(frozen=True)
class Copies:
    """The newest copy of a file in the object store; and the one before, if the newest is torn.

    good: as they were uploaded, as far as sums tell. torn: not so; whole lines in them may still be right.
    problems: what to tell people about the torn ones.
    """

    good: list[bytes] = field(default_factory=list[bytes])
    torn: list[bytes] = field(default_factory=list[bytes])
    problems: list[str] = field(default_factory=list[str])

    @property
    def all(self) -> list[bytes]:
        """All of them, those that can be relied on first."""
        return [*self.good, *self.torn]


class RunFiles:
    """Those of one prefix. Every method raises RemoteError if the object store refuses or fails."""

    def __init__(self, objects: Objects):
        self.objects = objects
        self._sums: dict[str, list[str]] | None = None
        self._put: dict[str, str] = {}
        """Sums of what this process has put."""

    def copies(self, name: str) -> Copies:
        """What there is of the file `name`."""
        found, sums = Copies(), self._read_sums().get(name)
        for place in (f"{FOLDER}/{name}", f"{EARLIER}/{name}"):
            content = self.objects.get(place)
            if content is None:
                continue
            if sums is None or sum_of(content) in sums:
                found.good.append(content)
                break
            found.torn.append(content)
            found.problems.append(
                f"{self.objects.url}/{place}: is not what was uploaded ({len(content)} bytes, and another "
                "checksum)"
            )
        return found

    def is_in(self, name: str, content: bytes) -> bool:
        """Whether `content` begins with all that was uploaded last of a file that only grows."""
        sums = self._read_sums().get(name)
        return bool(sums) and begins_with(content, sums[0])

    def put(self, files: Collection[Path], guard: Callable[[], None] = lambda: None) -> None:
        """Put these files where they are not what this process has put already.

        The copy that was there stays as the earlier one if it is good, and if it is the beginning of what
        replaces it: lines of a branch that the run has left must not come back.

        Args:
            guard: called right before each object is replaced; an error that it raises ends the upload.

        Raises:
            FileNotFoundError: a file is not there.
        """
        contents = {path.name: path.read_bytes() for path in sorted(files)}
        changed = {name: data for name, data in contents.items() if self._put.get(name) != sum_of(data)}
        if not changed:
            return
        sums = self._read_sums()
        for name, data in changed.items():
            there = self._put.get(name) or self._good_there(name)
            guard()
            if there and (not name.endswith(".jsonl") or begins_with(data, there)):
                self.objects.copy(f"{FOLDER}/{name}", f"{EARLIER}/{name}")
            elif there:
                self.objects.delete([f"{EARLIER}/{name}"])
            sums[name] = list(dict.fromkeys([sum_of(data), *([there] if there else []), *sums.get(name, [])]))
            del sums[name][KEPT_SUMS:]
        guard()
        self.objects.put(SUMS, (json.dumps(sums, indent=1) + "\n").encode())
        for name, data in changed.items():
            guard()
            self.objects.put(f"{FOLDER}/{name}", data)
            self._put[name] = sum_of(data)

    def _good_there(self, name: str) -> str | None:
        """The sum of the object of this name; None if there is none, or it is torn."""
        content = self.objects.get(f"{FOLDER}/{name}")
        if content is None:
            return None
        sums, found = self._read_sums().get(name), sum_of(content)
        return found if sums is None or found in sums else None  # earlier versions have put no sums

    def _read_sums(self) -> dict[str, list[str]]:
        if self._sums is None:
            text = self.objects.get(SUMS)
            try:
                self._sums = parse_json(text, dict[str, list[str]]) if text else {}
            except ValueError:  # then nothing is known, as with an earlier version
                self._sums = {}
        return self._sums


def newest(objects: Objects, name: str) -> bytes | None:
    """The newest good copy of a file; one that is torn if there is no other, None if there is none.

    Raises:
        RemoteError: the object store refuses or fails.
    """
    return next(iter(RunFiles(objects).copies(name).all), None)


def sum_of(content: bytes) -> str:
    """Size and CRC-64/NVME of a file, as `sums.json` has them."""
    return f"{len(content)} {crc64(content):016x}"


def begins_with(content: bytes, found: str) -> bool:
    """Whether the sum `found` is that of a beginning of `content`, or of all of it."""
    size = int(found.partition(" ")[0])
    return len(content) >= size and sum_of(content[:size]) == found


# What lists of steps show of each, in one object, so that many steps are listed with few requests.
# It is derived from the manifests. A row has the ETag of the object with the manifest that it was made of and
# counts while the store lists that object with that ETag; where no row counts, the manifest is read instead.


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


def summaries_of(objects: Objects, steps: Mapping[int, str | None], read: Read) -> list[dict[str, Any]]:
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


def update_catalog(objects: Objects, steps: Mapping[int, str | None], read: Read) -> None:
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
