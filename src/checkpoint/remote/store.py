"""The steps of a run in an object store; see the package's docstring for what lies where."""

import datetime
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import (
    FILE_NAME,
    MAX_BYTES,
    STEP_NAME,
    CheckpointError,
    Damaged,
    FileEntry,
    Manifest,
    check_crc,
    parse,
)
from cairn.checkpoint.packed import check_tables
from cairn.checkpoint.remote.objects import Exists, Objects, RemoteError
from cairn.checkpoint.remote.sent import Sent
from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.files import naming, sync

COMMITTED = "committed"
CLAIM = "run.json"
CATALOG = "catalog.json"
"""Summaries of the steps, so that many are listed with few requests; derived from their manifests."""
LISTED = {"step", "branch", "created", "run_id", "attempt", "parent", "world_size", "parts"}
"""Fields of a manifest in a summary."""
LISTED_METRICS = ("loss", "reward/mean")
FETCHES = 8
"""Ranges that are read at once."""
UPLOADS = 2
"""Files that are uploaded at once, each in several parts at a time."""
WORTH_COPYING = 1 << 20
"""Smaller files are sent again rather than copied within the object store."""
MOST_COPIED = 5 << 30
"""The largest object that S3 copies in one request."""
OnBytes = Callable[[int], None]


class Taken(UsageError):
    """A prefix belongs to another run, or another attempt of this run has taken it over."""


class RemoteStore:
    """The steps below a URL: a `checkpoint.tiers.Tier`.

    Every method raises RemoteError if the object store refuses or fails.
    """

    def __init__(self, objects: Objects):
        self.objects = objects

    def __str__(self) -> str:
        return self.objects.url

    # Reading

    def steps(self) -> list[int]:
        """The steps that exist, oldest first; one request for every thousand."""
        names = (Path(name) for name, _ in self.objects.list(COMMITTED))
        found = (STEP_NAME.fullmatch(path.stem) for path in names if path.suffix == ".json")
        return sorted(int(match[1]) for match in found if match)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        name = _committed(step)
        text = self.objects.get(name)
        where = f"{self}/{name}"
        if text is None:
            raise CheckpointError(f"{self}: there is no step {step}")
        if len(text) > MAX_BYTES:
            raise Damaged(f"{where}: not a manifest: it is larger than {MAX_BYTES} bytes")
        manifest = parse(text, where)
        if manifest.step != step:
            raise Damaged(f"{where}: belongs to step {manifest.step}")
        return manifest

    def summaries(self) -> list[dict[str, Any]]:
        """What lists of steps show of each step, oldest first; see `summary`.

        One object has it for all steps; a manifest is read only for a step that the object lacks.
        """
        known = self._catalog()
        return [known.get(step) or summary(self.manifest(step)) for step in self.steps()]

    def _catalog(self) -> dict[int, dict[str, Any]]:
        """The summaries that were written with earlier steps; empty if they can't be read."""
        try:
            rows = json.loads(self.objects.get(CATALOG) or b"[]")
            return {row["step"]: row for row in rows}
        except (ValueError, TypeError, KeyError):
            return {}

    def _add_to_catalog(self, manifest: Manifest) -> None:
        steps = set(self.steps())
        rows = {step: row for step, row in self._catalog().items() if step in steps}
        rows[manifest.step] = summary(manifest)
        self.objects.put(CATALOG, json.dumps([rows[step] for step in sorted(rows)]).encode())

    def fetch(self, step: int, store: CheckpointStore, *, on_bytes: OnBytes = lambda n: None) -> Path:
        """Download a step into the local store; returns its folder.

        Each chunk is compared with the manifest as it arrives, and asked for once more if it differs.

        Raises:
            CheckpointError: the step does not exist here, or exists there already.
            Damaged: an object is not what the manifest says.
            OSError: a file can't be written; the error names it.
        """
        manifest = self.manifest(step)
        return store.receive(manifest, lambda folder: self._fill(folder, manifest, on_bytes))

    def verify(self, step: int, *, on_bytes: OnBytes = lambda n: None) -> Manifest:
        """Read every byte of a step, and compare it with the manifest; nothing is written.

        Raises:
            CheckpointError: the step does not exist.
            Damaged: an object is not what the manifest says.
        """
        manifest = self.manifest(step)
        self._check_sizes(manifest)

        def check(place: tuple[str, int]) -> int:
            return len(self._chunk(manifest, *place))

        with ThreadPoolExecutor(FETCHES) as pool:
            for count in pool.map(check, _chunks(manifest)):
                on_bytes(count)
        return manifest

    def _fill(self, folder: Path, manifest: Manifest, on_bytes: OnBytes) -> None:
        """Write a step's files into `folder`, and fsync them."""
        self._check_sizes(manifest)
        for name, entry in manifest.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), open(path, "wb") as file:
                file.truncate(entry.size)

        def copy(place: tuple[str, int]) -> int:
            name, chunk = place
            data = self._chunk(manifest, name, chunk)
            with naming(folder / name), open(folder / name, "r+b", buffering=0) as file:
                _write_all(file.fileno(), data, chunk * CHUNK_BYTES)
                # The disk begins to write it now, while other chunks arrive, rather than at the fsync.
                os.posix_fadvise(file.fileno(), chunk * CHUNK_BYTES, len(data), os.POSIX_FADV_DONTNEED)
            return len(data)

        with ThreadPoolExecutor(FETCHES) as pool:
            for count in pool.map(copy, _chunks(manifest)):
                on_bytes(count)
        for name in manifest.files:
            sync(folder / name)
        check_tables(folder, manifest.contents)

    def _chunk(self, manifest: Manifest, name: str, chunk: int) -> memoryview:
        """One chunk of a file, whose checksum is right."""
        entry = manifest.files[name]
        key, first = f"step_{manifest.step}/{name}", chunk * CHUNK_BYTES
        for last in (False, True):
            data = self.objects.read(key, first, min(CHUNK_BYTES, entry.size - first))
            try:
                check_crc(Path(f"{self}/{key}"), entry, chunk, crc64(data))
                return data
            except Damaged as error:
                if last:  # the object is damaged, not what came over the network
                    raise Damaged(str(error).replace(str(Path(f"{self}/{key}")), f"{self}/{key}")) from None
        raise AssertionError

    def _check_sizes(self, manifest: Manifest) -> None:
        """Compare names and sizes of a step's objects with the manifest.

        Raises:
            Damaged: an object is missing, or has another size.
        """
        folder = f"step_{manifest.step}/"
        found = {name.removeprefix(folder): size for name, size in self.objects.list(folder.rstrip("/"))}
        for name, entry in manifest.files.items():
            if found.get(name) != entry.size:
                what = "is missing" if name not in found else f"has {found[name]} bytes"
                raise Damaged(f"{self}/{folder}{name}: {what}, but should have {entry.size} bytes")

    # Writing

    def put(
        self,
        folder: Path,
        manifest: Manifest,
        sent: Sent,
        *,
        on_bytes: OnBytes = lambda n: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Upload a committed local step.

        Every chunk is compared with the manifest as it is read. Files that `sent` lists are not sent again;
        those whose content the newest remote step has are copied within the object store.

        Args:
            folder: the step's folder.
            sent: notes what was sent, for a later process.
            check: called right before the step is committed; an error that it raises ends the upload.

        Raises:
            Damaged: a local file is not what the manifest says.
            CheckpointError: the object store has another step of this number.
        """
        step = manifest.step
        if self._is_there(manifest):
            return
        before = self._content_of_newest()
        prefix = f"step_{step}/"

        def upload(name: str) -> None:
            entry = manifest.files[name]
            if sent.has(name, entry):
                on_bytes(entry.size)
                return
            if (source := before.get(_content(entry))) and WORTH_COPYING <= entry.size <= MOST_COPIED:
                self.objects.copy(source, prefix + name)
                on_bytes(entry.size)
            elif entry.size <= CHUNK_BYTES:
                self.objects.put(prefix + name, b"".join(_checked(folder / name, entry, on_bytes)))
            else:
                self.objects.put_parts(prefix + name, partial(_checked, folder / name, entry, on_bytes))
            fault_point("remote.sent_file")
            sent.add(name, entry)

        names = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(upload, names))
        self._check_sizes(manifest)
        check()
        fault_point("remote.before_manifest")
        text = manifest.to_json()
        self.objects.put(prefix + FILE_NAME, text)
        self.objects.make_durable(f"step_{step}")
        try:
            self.objects.put_new(_committed(step), text)
            self.objects.make_durable(COMMITTED)
        except Exists:
            self._is_there(manifest)  # raises, since it is another attempt's
        fault_point("remote.done")
        self._add_to_catalog(manifest)

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether the step is committed with this content.

        Raises:
            CheckpointError: it is committed with another content.
        """
        text = self.objects.get(_committed(manifest.step))
        if text is not None and parse(text, f"{self}/{_committed(manifest.step)}") != manifest:
            raise CheckpointError(
                f"{self}: has another step {manifest.step}, of another attempt or branch; remove it "
                f"(ckpt prune), or give the run another ckpt.remote"
            )
        return text is not None

    def _content_of_newest(self) -> dict[tuple[int, tuple[str, ...]], str]:
        """Names of the objects of the newest step, by their content."""
        for step in reversed(self.steps()):
            try:
                files = self.manifest(step).files
            except CheckpointError:
                continue
            return {_content(entry): f"step_{step}/{name}" for name, entry in files.items()}
        return {}

    def delete(self, step: int) -> None:
        """Delete a step: first what commits it, then its manifest, then the rest."""
        self.objects.delete([_committed(step), f"step_{step}/{FILE_NAME}"])
        fault_point("remote.uncommitted")
        self.objects.delete([name for name, _ in self.objects.list(f"step_{step}")])

    def set_aside_after(self, step: int, name: str) -> list[int]:
        """Uncommit the steps after `step`, which belong to a branch that the run has left; returns them.

        Their manifests stay in `abandoned/<name>`, and their files where they are, until a step of the same
        number replaces them.
        """
        later = [number for number in self.steps() if number > step]
        for number in later:
            self.objects.copy(_committed(number), f"abandoned/{name}/step_{number}.json")
            self.objects.delete([_committed(number), f"step_{number}/{FILE_NAME}"])
        return later

    # Whose prefix it is

    def claim(self, run_id: str, owner: str) -> None:
        """Take the prefix for an attempt of a run; an older attempt of the same run loses it.

        Args:
            owner: identifies the attempt, wherever it runs.

        Raises:
            Taken: it belongs to another run.
        """
        found = self._claim()
        if found is not None and found.get("run_id") != run_id:
            raise Taken(
                f"ckpt.remote {self} belongs to run {found.get('run_id')}, and this is run {run_id}; "
                "give another prefix"
            )
        content = {"run_id": run_id, "owner": owner, "since": _now()}
        text = json.dumps(content, indent=1).encode()
        if found is not None:
            self.objects.put(CLAIM, text)
            return
        try:
            self.objects.put_new(CLAIM, text)
        except Exists:  # another run, or a process of this one, came first by a moment
            self.claim(run_id, owner)

    def owner(self) -> str | None:
        """The id of the run that the prefix belongs to; None if it belongs to none."""
        found = self._claim()
        return None if found is None else str(found.get("run_id"))

    def check_owner(self, owner: str) -> None:
        """Check that no newer attempt has claimed the prefix since.

        Raises:
            Taken: one has.
        """
        found = self._claim() or {}
        if found.get("owner") != owner:
            raise Taken(f"ckpt.remote {self}: another attempt has taken it over ({found.get('since')})")

    def _claim(self) -> dict[str, Any] | None:
        text = self.objects.get(CLAIM)
        if text is None:
            return None
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise RemoteError(f"{self}/{CLAIM}: is damaged; if the prefix is this run's, delete the object")
        return cast("dict[str, Any]", content)


def summary(manifest: Manifest) -> dict[str, Any]:
    """What lists of steps show of a manifest."""
    metrics = {name: manifest.metrics[name] for name in LISTED_METRICS if name in manifest.metrics}
    return {**manifest.model_dump(include=LISTED), "bytes": manifest.nbytes, "metrics": metrics}


def _content(entry: FileEntry) -> tuple[int, tuple[str, ...]]:
    return entry.size, tuple(entry.crc64nvme)


def _committed(step: int) -> str:
    return f"{COMMITTED}/step_{step}.json"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _chunks(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """File and number of every chunk of a step."""
    for name, entry in manifest.files.items():
        for chunk in range(len(entry.crc64nvme)):
            yield name, chunk


def _checked(path: Path, entry: FileEntry, on_bytes: OnBytes) -> Iterator[bytes]:
    """The chunks of a local file, each compared with the manifest before it is sent."""
    with naming(path), open(path, "rb", buffering=0) as file:
        for chunk in range(len(entry.crc64nvme)):
            data = file.read(CHUNK_BYTES)
            check_crc(path, entry, chunk, crc64(memoryview(data)))
            yield data
            on_bytes(len(data))


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
