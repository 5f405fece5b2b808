"""The steps of a run in an object store; see the package's docstring for what lies where."""

from collections.abc import Callable, Collection, Iterable, Iterator
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
    Manifest,
    parse,
)
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.compression import check_tables
from cairn.remote import catalog, chunks
from cairn.remote.client.listing import Listed
from cairn.remote.client.objects import Objects
from cairn.remote.client.upload_body import OnBytes, UploadBody
from cairn.remote.client.upload_journal import Sent
from cairn.remote.dedup import known_there
from cairn.remote.prefix_lease import CLAIM, Claims
from cairn.run.faults import fault_point
from cairn.run.files import naming, sync
from cairn.run.object_store import Exists, RemoteError

if TYPE_CHECKING:
    from cairn.remote.client.multipart import Unfinished

COMMITTED = "committed"
ABANDONED = "abandoned"
FETCHES = 8
"""Ranges that are read at once."""
UPLOADS = 2
"""Files that are uploaded at once, each in several parts at a time."""


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
        """What lists of steps show of each step, oldest first; see `catalog.summary`.

        One object has it for all steps; a manifest is read only for a step that the object does not describe.
        """
        return catalog.summaries(self.objects, self._manifests(), self._read)

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
        catalog.update(self.objects, self._manifests(), self._read)

    def _check_sent(self, manifest: Manifest, sent: Sent) -> dict[str, Listed]:
        """Check that the objects of a step are those that were sent; one with another ETag is read.

        Returns all that are there.

        Raises:
            RemoteError: an object is missing or was replaced; the next upload sends it again.
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


def strangers(found: Collection[str], wanted: Collection[str]) -> list[str]:
    """The names in a step's folder that are not wanted; none if the folder is the prefix of another run."""
    if CLAIM in found or any(map(STEP_NAME.match, found)):
        return []
    return [name for name in found if name not in wanted]


def _committed(step: int) -> str:
    return f"{COMMITTED}/step_{step}.json"
