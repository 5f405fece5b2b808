"""The steps of a run in an object store; see the package's docstring for what lies where."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import (
    FILE_NAME,
    MAX_BYTES,
    STEP_NAME,
    CheckpointError,
    Damaged,
    FileEntry,
    Manifest,
    parse,
)
from cairn.checkpoint.packed import check_tables
from cairn.checkpoint.remote import catalog, chunks
from cairn.checkpoint.remote.claims import Claims
from cairn.checkpoint.remote.content import Content, OnBytes
from cairn.checkpoint.remote.errors import Exists, RemoteError
from cairn.checkpoint.remote.objects import Objects
from cairn.checkpoint.remote.sent import Sent
from cairn.checkpoint.store import CheckpointStore
from cairn.run.faults import fault_point
from cairn.run.files import naming, sync

if TYPE_CHECKING:
    from cairn.checkpoint.remote.multipart import Unfinished

COMMITTED = "committed"
FETCHES = 8
"""Ranges that are read at once."""
UPLOADS = 2
"""Files that are uploaded at once, each in several parts at a time."""
WORTH_COPYING = 1 << 20
"""Smaller files are sent again rather than copied within the object store."""
MOST_COPIED = 5 << 30
"""The largest object that S3 copies in one request."""


class AnotherStep(CheckpointError):
    """The object store has another step of this number: one whose manifest is `found`."""

    def __init__(self, message: str, found: Manifest):
        super().__init__(message)
        self.found = found


class RemoteStore(Claims):
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
        """What lists of steps show of each step, oldest first; see `catalog.summary`.

        One object has it for all steps; a manifest is read only for a step that the object lacks.
        """
        known = catalog.read(self.objects)
        return [known.get(step) or catalog.summary(self.manifest(step)) for step in self.steps()]

    def fetch(self, step: int, store: CheckpointStore, *, on_bytes: OnBytes = lambda n: None) -> Path:
        """Download a step into the local store; returns its folder.

        Each chunk is compared with the manifest as it arrives, and asked for once more if it differs.

        Raises:
            CheckpointError: the step does not exist here, or exists there already.
            Damaged: an object is not what the manifest says.
            OSError: a file can't be written; the error names it.
        """
        manifest = self.manifest(step)
        return store.receive(manifest, lambda folder: self.fill(folder, manifest, on_bytes))

    def verify(self, step: int, *, on_bytes: OnBytes = lambda n: None) -> Manifest:
        """Read every byte of a step, and compare it with the manifest; nothing is written.

        Raises:
            CheckpointError: the step does not exist.
            Damaged: an object is not what the manifest says.
        """
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

    def check_sizes(self, manifest: Manifest) -> None:
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
        pace: OnBytes = lambda n: None,
        on_bytes: OnBytes = lambda n: None,
        guard: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Upload a committed local step.

        Every chunk is compared with the manifest as it is read. Files and parts that `sent` lists are not
        sent again if they are there; files whose content the newest remote step has are copied within the
        object store.

        Args:
            folder: the step's folder.
            sent: notes what was sent, for a later process.
            pace: called before bytes are sent, with their number; it may wait.
            guard: called right before each object of the step is replaced, and before the one is put that
                commits it; an error that it raises ends the upload.
            check: called when all files are there; an error that it raises ends the upload.

        Raises:
            Damaged: a local file is not what the manifest says.
            AnotherStep: the object store has another step of this number.
        """
        step = manifest.step
        if self._is_there(manifest):
            return
        before = self._content_of_newest()
        prefix = f"step_{step}/"
        there = dict(self.objects.list(f"step_{step}"))

        def upload(name: str) -> None:
            entry = manifest.files[name]
            if sent.has(name, entry) and there.get(prefix + name) == entry.size:
                on_bytes(entry.size)
                return
            if (source := before.get(_content(entry))) and WORTH_COPYING <= entry.size <= MOST_COPIED:
                guard()
                self.objects.copy(source, prefix + name)
                on_bytes(entry.size)
            else:
                content = Content(folder / name, entry, pace=pace, on_bytes=on_bytes, guard=guard)
                if entry.size <= CHUNK_BYTES:
                    data = b"".join(content.pieces())
                    guard()
                    self.objects.put(prefix + name, data)
                else:
                    self.objects.put_parts(prefix + name, content, sent.parts(name))
            fault_point("remote.sent_file")
            sent.add(name, entry)

        names = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(upload, names))
        try:
            self.check_sizes(manifest)
        except Damaged as error:  # of what is there; the next upload sends it again
            raise RemoteError(str(error)) from None
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
        catalog.add(self.objects, manifest, self.steps())

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether the step is committed with this content.

        Raises:
            AnotherStep: it is committed with another content.
            CheckpointError: what commits it can't be read.
        """
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

    def _content_of_newest(self) -> dict[tuple[int, tuple[str, ...]], str]:
        """Names of the objects of the newest step, by their content."""
        for step in reversed(self.steps()):
            try:
                files = self.manifest(step).files
            except CheckpointError:
                continue
            return {_content(entry): f"step_{step}/{name}" for name, entry in files.items()}
        return {}

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
            self.objects.copy(_committed(step), f"abandoned/{name}/step_{step}.json")
            self.objects.delete([_committed(step), f"step_{step}/{FILE_NAME}"])


def _content(entry: FileEntry) -> tuple[int, tuple[str, ...]]:
    return entry.size, tuple(entry.crc64nvme)


def _committed(step: int) -> str:
    return f"{COMMITTED}/step_{step}.json"
