"""The steps of a run in an object store; see the package's docstring for what lies where."""

import contextlib
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.eval_metrics import RATINGS, Ratings
from cairn.checkpoint.manifest import (
    FILE_NAME,
    MAX_BYTES,
    STEP_NAME,
    CheckpointError,
    Damaged,
    Manifest,
    load_manifest,
    parse,
)
from cairn.checkpoint.store import PINS
from cairn.checkpoint.tensors.compression import check_tables
from cairn.checkpoint.tiers import Receiver, Removable, SavedStep, read_steps
from cairn.remote import chunks
from cairn.remote.client.objects import Listed, Objects
from cairn.remote.client.upload_body import OnBytes, Sent, UploadBody
from cairn.remote.dedup import known_there
from cairn.remote.prefix_lease import CLAIM, Claims
from cairn.remote.run_files import LISTED_METRICS, newest, summaries_of, update_catalog
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.files import naming, parse_json, sync
from cairn.run.object_store import Exists, RemoteError
from cairn.run.output import Stage

if TYPE_CHECKING:
    from cairn.remote.client.multipart import Unfinished

T = TypeVar("T")
COMMITTED = "committed"
ABANDONED = "abandoned"
FETCHES = 8
"""Ranges that are read at once."""
UPLOADS = 2
"""Files that are uploaded at once, each in several parts at a time."""


FORGOTTEN = timedelta(days=1)
"""Age from which parts and objects of a step are given up that nobody is known to upload."""


@dataclass(frozen=True)
class Leftovers:
    """The objects of a step that does not exist.

    names: relative to the URL. newest: when the last of them was put, by the clock of the object store.
    """

    step: int
    names: tuple[str, ...]
    newest: datetime


@dataclass(frozen=True)
class Aside:
    """A step that was set aside.

    note: name of the object with its manifest. since: when that was put, by the clock of the object store;
    later objects of the step's number are of another step.
    """

    step: int
    note: str
    since: datetime


class AnotherStep(CheckpointError):
    """The object store has another step of this number: one whose manifest is `found`."""

    def __init__(self, message: str, found: Manifest):
        super().__init__(message)
        self.found = found


class RemoteStore(Claims):
    """The steps below a URL: a `checkpoint.tiers.Tier`.

    Every method raises RemoteError if the object store refuses or fails.

    Args:
        origin: the URL of the step that the run was forked from, for the first upload.
    """

    def __init__(self, objects: Objects, origin: str | None = None):
        self.objects = objects
        self.origin = origin

    def __str__(self) -> str:
        return self.objects.url

    # Reading

    def name_of(self, step: int) -> str:
        return f"{self}/step_{step}"

    def steps(self) -> list[int]:
        """The steps that exist, oldest first; one request for every thousand."""
        return sorted(self._manifests())

    def _manifests(self) -> dict[int, str | None]:
        """The ETags of the objects that commit steps, by step."""
        found = ((Path(name), listed.etag) for name, listed in self.objects.look(COMMITTED).items())
        paths = ((STEP_NAME.fullmatch(path.stem), etag) for path, etag in found if path.suffix == ".json")
        return {int(match[1]): etag for match, etag in paths if match}

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        return self._read(step)[0]

    def _read(self, step: int) -> tuple[Manifest, str | None]:
        """The manifest of a step, and the ETag of the object that commits it."""
        name = _committed(step)
        where, found = f"{self}/{name}", self.objects.tagged(name)
        text, etag = found or (b"", None)
        if found is None:
            raise CheckpointError(f"{self}: there is no step {step}")
        if len(text) > MAX_BYTES:
            raise Damaged(f"{where}: not a manifest: it is larger than {MAX_BYTES} bytes")
        manifest = parse(text, where)
        if manifest.step != step:
            raise Damaged(f"{where}: belongs to step {manifest.step}")
        return manifest, etag

    def summaries(self) -> list[dict[str, Any]]:
        """What lists of steps show of each step, oldest first; see `run_files.summary`.

        One object has it for all steps; a manifest is read only for a step that the object does not describe.
        """
        return summaries_of(self.objects, self._manifests(), self._read)

    def rows(
        self, metric: str | None = None, kept_by: Mapping[int, list[str]] | None = None
    ) -> list[dict[str, Any]]:
        """What `ckpt list` shows of the steps; another metric than the catalog's takes a request for each."""
        summaries: list[dict[str, Any]] = self.summaries()
        if metric is not None and metric not in LISTED_METRICS:
            found = {one.step: one.metrics for one in self.measured(metric)}
            for row in summaries:
                row["metrics"] = found.get(row["step"], row["metrics"])
        return [
            {
                "folder": self.name_of(row["step"]),
                "state": "complete" if row["parts"] != ["model"] else "complete, weights only",
                "kept_by": (kept_by or {}).get(row["step"], []),
                **row,
            }
            for row in summaries
        ]

    def measured(self, metric: str | None) -> list[SavedStep]:
        if metric is None:
            return [SavedStep(step, {}) for step in self.steps()]
        if metric in LISTED_METRICS:
            return [SavedStep(row["step"], row["metrics"]) for row in self.summaries()]
        return read_steps(self, self.ratings())

    def ratings(self) -> Ratings:
        return Ratings(self._of_run(RATINGS, dict[str, dict[str, float]]) or {})

    def pins(self) -> set[int]:
        return set(self._of_run(PINS, list[int]) or [])

    def _of_run(self, name: str, kind: type[T]) -> T | None:
        """The content of a small JSON file of the run; None if there is none."""
        text = newest(self.objects, name)
        try:
            return None if text is None else parse_json(text, kind)
        except ValueError:
            what = "it must be a list of steps: " if name == PINS else ""
            raise CheckpointError(f"{self}/run/{name}: is damaged; {what}repair or remove it") from None

    def fetch(self, step: int, store: Receiver, *, on_bytes: OnBytes = lambda n: None) -> Path:
        # Each chunk is compared as it arrives, and asked for once more if it differs.
        manifest = self.manifest(step)
        return store.receive(manifest, lambda folder: self.fill(folder, manifest, on_bytes))

    def verify(self, step: int, *, on_bytes: OnBytes = lambda n: None) -> Manifest:
        manifest = self.manifest(step)
        self.check_sizes(manifest)

        with ThreadPoolExecutor(FETCHES) as pool:
            for count in pool.map(partial(chunks.check, self.objects, manifest), chunks.places(manifest)):
                on_bytes(count)
        return manifest

    def fill(self, folder: Path, manifest: Manifest, on_bytes: OnBytes) -> None:
        """Write a step's files into `folder`, and fsync them."""
        self.check_sizes(manifest)
        for name in manifest.files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path):
                path.write_bytes(b"")  # files that have their size before their bytes take longer to write

        copy = partial(chunks.copy, self.objects, manifest, folder=folder)
        with ThreadPoolExecutor(FETCHES) as pool:
            for count in pool.map(copy, chunks.places(manifest)):
                on_bytes(count)
        for name in manifest.files:
            sync(folder / name)
        check_tables(folder, manifest.contents)

    def check_sizes(self, manifest: Manifest) -> dict[str, Listed]:
        """Compare names and sizes of a step's objects with the manifest; returns all that are there.

        Raises:
            Damaged: an object is missing, or has another size.
        """
        found = self.look(manifest.step)
        for name, entry in manifest.files.items():
            if name not in found or found[name].size != entry.size:
                what = "is missing" if name not in found else f"has {found[name].size} bytes"
                raise Damaged(
                    f"{self}/step_{manifest.step}/{name}: {what}, but should have {entry.size} bytes"
                )
        return found

    def check(self, step: int) -> None:
        self.check_sizes(self.manifest(step))

    def look(self, step: int) -> dict[str, Listed]:
        """What lies in the folder of a step, by names in it."""
        folder = f"step_{step}/"
        found = self.objects.look(folder.rstrip("/"))
        return {name.removeprefix(folder): listed for name, listed in found.items()}

    # Writing

    def put(
        self,
        folder: Path,
        manifest: Manifest,
        sent: Sent,
        *,
        pace: OnBytes = lambda n: None,
        on_bytes: OnBytes = lambda n: None,
        guard: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Upload a committed local step.

        Every chunk is compared with the manifest as it is read. Files and parts that `sent` lists are not
        sent again if they are there; what the object store has already is copied there (`known_there`).

        Args:
            folder: the step's folder.
            sent: notes what was sent, for a later process. What was replaced since, as by another attempt
                that had this step, is sent again.
            pace: called before bytes are sent, with their number; it may wait.
            guard: called right before each object of the step is replaced, before those are deleted that an
                earlier step of its number has left, and before the one is put that commits it; an error that
                it raises ends the upload.
            check: called when all files are there; an error that it raises ends the upload.

        Raises:
            Damaged: a local file is not what the manifest says.
            AnotherStep: the object store has another step of this number.
        """
        step = manifest.step
        if self._is_there(manifest):
            return
        known = known_there(self, self.objects.url, self.origin, lambda url: RemoteStore(Objects(url)))
        prefix = f"step_{step}/"
        there = self.look(step)

        def upload(name: str) -> None:
            entry, found = manifest.files[name], there.get(name)
            if found and found.size == entry.size and found.etag and found.etag == sent.etag(name):
                on_bytes(entry.size)
                return
            etag = None
            if source := known.file(entry):
                guard()
                etag = self.objects.copy_file(source, prefix + name, entry)
            if etag is not None:
                on_bytes(entry.size)
            else:
                path = folder / name
                content = UploadBody(
                    path, entry, pace=pace, on_bytes=on_bytes, guard=guard, known=known.place
                )
                if entry.size <= CHUNK_BYTES:
                    data = b"".join(content.pieces())
                    guard()
                    etag = self.objects.put(prefix + name, data)
                else:
                    etag = self.objects.put_parts(prefix + name, content, sent.parts(name))
            fault_point("remote.sent_file")
            sent.add(name, etag)

        names = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(upload, names))
        there = self._check_sent(manifest, sent)
        if foreign := strangers(there, {*manifest.files, FILE_NAME}):
            guard()
            self.objects.delete([prefix + name for name in foreign])
        check()
        fault_point("remote.before_manifest")
        text = manifest.to_json()
        guard()
        self.objects.put(prefix + FILE_NAME, text)
        self.objects.make_durable(f"step_{step}")
        fault_point("remote.before_commit")
        guard()
        try:
            self.objects.put_new(_committed(step), text)
            self.objects.make_durable(COMMITTED)
        except Exists:
            if not self._is_there(manifest):  # it raises, as a rule: the step is another attempt's
                raise RemoteError(f"{self}/{_committed(step)}: was there and is not any more") from None
        fault_point("remote.done")
        update_catalog(self.objects, self._manifests(), self._read)

    def _check_sent(self, manifest: Manifest, sent: Sent) -> dict[str, Listed]:
        """Check that the objects of a step are those that were sent; one with another ETag is read.

        Returns all that are there. The next upload sends what is missing or was replaced.
        """
        try:
            found = self.check_sizes(manifest)
            changed = [n for n in manifest.files if sent.etag(n) not in (None, found[n].etag)]
            for name in changed:
                for chunk in range(len(manifest.files[name].crc64nvme)):
                    chunks.check(self.objects, manifest, (name, chunk))
            return found
        except Damaged as error:
            raise RemoteError(str(error)) from None

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether the step is committed, which must be with this content."""
        text = self.objects.get(_committed(manifest.step))
        if text is None:
            return False
        found = parse(text, f"{self}/{_committed(manifest.step)}")
        if found != manifest:
            raise AnotherStep(
                f"{self}: has another step {manifest.step}, of another attempt or branch; remove it "
                f"(ckpt prune), or give the run another ckpt.remote",
                found,
            )
        return True

    def take(self, folder: Path, name: str, *, link: bool = False, stage: Stage) -> str:
        if link:
            raise UsageError(f"--link: {name} is a URL, where no hard links can be; leave out --link")
        manifest = load_manifest(folder)
        others = {row["run_id"] for row in self.summaries()}
        others |= {owner} if (owner := self.owner()) else set()
        if others - {manifest.run_id}:
            raise UsageError(
                f"{name}: holds the run {', '.join(sorted(others))}, and {folder} is of run "
                f"{manifest.run_id}; give another prefix"
            )
        self.claim_for_run(manifest.run_id)  # first, so that no other run takes the prefix for its own
        with tempfile.TemporaryDirectory(prefix="cairn-") as notes:
            sent = Sent(Path(notes) / "sent", manifest)
            progress = stage(f"uploading step {manifest.step}", manifest.nbytes)
            self.put(folder, manifest, sent, on_bytes=progress)
        return self.name_of(manifest.step)

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        yield

    def unfinished(self) -> Iterator["tuple[int, Unfinished]"]:
        """The uploads in parts that were not completed, with their steps; not those of runs below."""
        for found in self.objects.unfinished("step_"):
            folder, _, rest = found.name.partition("/")
            if (match := STEP_NAME.fullmatch(folder)) and rest and not STEP_NAME.match(rest):
                yield int(match[1]), found

    def delete(self, step: int) -> None:
        """Delete a step: first what commits it, then its manifest, then the rest."""
        self.objects.delete([_committed(step), f"step_{step}/{FILE_NAME}"])
        fault_point("remote.uncommitted")
        self.objects.delete([name for name, _ in self.objects.list(f"step_{step}")])

    def set_aside_after(self, step: int, name: str) -> list[int]:
        """Uncommit the steps after `step`, which belong to a branch that the run has left; returns them."""
        later = [number for number in self.steps() if number > step]
        self.set_aside(later, name)
        return later

    def set_aside(self, steps: Iterable[int], name: str) -> None:
        """Uncommit these steps.

        Their manifests stay in `abandoned/<name>`, and their files where they are, until a step of the same
        number replaces them.
        """
        for step in steps:
            self.objects.copy(_committed(step), f"{ABANDONED}/{name}/step_{step}.json")
            self.objects.delete([_committed(step), f"step_{step}/{FILE_NAME}"])

    # What belongs to no step

    def steps_aside(self) -> list[Aside]:
        """The steps that were set aside because the run has gone back behind them."""
        found = self.objects.look(ABANDONED)
        matches = ((STEP_NAME.fullmatch(Path(name).stem), name) for name in sorted(found))
        return [Aside(int(match[1]), name, found[name].modified) for match, name in matches if match]

    def abandoned_branches(self) -> list[Removable]:
        branches: dict[str, list[Aside]] = {}
        for one in self.steps_aside():
            branches.setdefault(str(Path(one.note).parent), []).append(one)

        def forget(steps: list[Aside]) -> None:
            for one in steps:
                self.forget(one)

        return [Removable(f"{self}/{name}", partial(forget, steps)) for name, steps in branches.items()]

    def forget(self, aside: Aside) -> None:
        """Delete a step that was set aside.

        Its files stay if a step of its number exists, or has been sent to its place since; then the commit of
        that step removes what is not of it.
        """
        self.objects.delete([aside.note])
        if aside.step in self.steps():
            return
        left = self._left_of(aside.step)
        if left is not None and left.newest <= aside.since:
            self.objects.delete(left.names)

    def leftovers(self) -> Iterator[Leftovers]:
        """Objects of steps that are neither committed nor set aside, without what another run has below."""
        # Folders come before steps, so that a step that is committed meanwhile does not count as left over.
        folders = self.objects.folders()
        there, aside = self.steps(), self.steps_aside()
        numbers = {int(match[1]) for folder in folders if (match := STEP_NAME.fullmatch(folder))}
        for step in sorted(numbers.difference(there)):
            found = self._left_of(step)
            if found and not any(one.step == step and found.newest <= one.since for one in aside):
                yield found

    def _left_of(self, step: int) -> Leftovers | None:
        """All objects of a step; None if there are none, or those of another run."""
        found = self.look(step)
        names = strangers(found, ())
        if not names:
            return None
        objects = tuple(f"step_{step}/{name}" for name in names)
        return Leftovers(step, objects, max(found[name].modified for name in names))

    def useless_debris(self) -> list[Removable]:
        """What is left of steps that nobody is uploading: nothing was sent of them for a day."""
        since = datetime.now(UTC) - FORGOTTEN
        busy = {step for step, unfinished in self.unfinished() if unfinished.begun > since}
        return [
            Removable(self.name_of(left.step), partial(self.objects.delete, left.names))
            for left in self.leftovers()
            if left.newest < since and left.step not in busy
        ]


def strangers(found: Collection[str], wanted: Collection[str]) -> list[str]:
    """The names in a step's folder that are not wanted; none if the folder is the prefix of another run."""
    if CLAIM in found or any(map(STEP_NAME.match, found)):
        return []
    return [name for name in found if name not in wanted]


def _committed(step: int) -> str:
    return f"{COMMITTED}/step_{step}.json"
