"""The small files of a run in its object store: metrics, history, evaluations, pins, ratings.

`run/NAME` is the newest copy of each, and `run/earlier/NAME` the one before. `run/sums.json` has size and
CRC-64/NVME of both: it is put before the object that it describes, so that an object which is in none of its
lines is not what was uploaded. Prefixes of earlier versions of Cairn have neither sums nor earlier copies.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from cairn.checkpoint.checksums import crc64
from cairn.remote.client.objects import Objects
from cairn.run.files import parse_json

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
