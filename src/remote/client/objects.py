"""Objects below a URL (s3://, gs://, az://, file://), through the package obstore."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import FileEntry
from cairn.remote.client.upload_body import Listing, Sent, SentParts, UploadBody, chunks_of
from cairn.run.files import sync
from cairn.run.object_store import (
    REQUEST_SECONDS,
    RETRY_SECONDS,
    Exists,
    ObjectReader,
    RemoteError,
    TransientError,
    tag,
)
from cairn.run.output import Stage

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

    from cairn.remote.client.multipart import Multipart, ServerCopies, Unfinished
    from cairn.remote.client.s3 import S3

# What an object store tells of its objects in lists.


@dataclass(frozen=True)
class Listed:
    """An object: its size in bytes, its ETag, and when it was put, by the clock of the object store.

    The ETag is another one once the object is replaced by one with another content.
    """

    size: int
    etag: str | None
    modified: datetime


def listed(store: "ObjectStore", prefix: str) -> dict[str, Listed]:
    """The objects whose names begin with the folder `prefix`, by name; one request for every thousand."""
    import obstore

    pages: Iterable[Sequence[ObjectMeta]] = obstore.list(store, prefix or None)  # pyright: ignore[reportUnknownMemberType]
    return {
        entry["path"]: Listed(entry["size"], tag(entry["e_tag"]), entry["last_modified"])
        for page in pages
        for entry in page
    }


def folders(store: "ObjectStore") -> list[str]:
    """The names of the folders at the top; one request for every thousand."""
    import obstore

    found = obstore.list_with_delimiter(store)  # pyright: ignore[reportUnknownMemberType]
    return [path.rstrip("/") for path in found["common_prefixes"]]


CONCURRENT_PARTS = 8
PIECE_BYTES = 1 << 20
"""Least bytes that a reader of an object gets at a time; they stay in the processor's cache meanwhile."""


class Objects(ObjectReader):
    """The objects below a URL, by names relative to it: reading and writing.

    Every method raises RemoteError, except where a missing object is an answer.

    Args:
        retry_seconds: how long a failing request is repeated.
    """

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS):
        super().__init__(url, retry_seconds=retry_seconds)
        s3 = urlsplit(self.url).scheme == "s3"
        self._s3 = self._past_obstore() if s3 else None
        self._copies, self._multipart = self._within(self._s3) if self._s3 is not None else (None, None)

    def put(self, name: str, content: bytes) -> str | None:
        """Put a small object; one of that name is replaced. Returns its ETag, if the store tells it."""
        import obstore

        put = self._try(name, lambda: obstore.put(self._store, name, content, use_multipart=False))
        return tag(put["e_tag"])

    def put_new(self, name: str, content: bytes) -> None:
        """Put a small object unless one of that name exists, in one atomic request.

        Raises:
            Exists: there is one, with another content.
        """
        import obstore

        try:
            self._try(name, lambda: obstore.put(self._store, name, content, mode="create"))
        except Exists:
            if self.get(name) != content:  # else the answer to an earlier request was lost
                raise

    def put_parts(self, name: str, content: UploadBody, notes: SentParts) -> str | None:
        """Put an object of any size but none, which appears when its last part has arrived.

        In S3, parts that have arrived before are not sent again; other stores get the object anew. Returns
        the object's ETag, if the store tells it.

        Raises:
            Damaged: the file is not what the manifest says.
            OSError: it can't be read.
        """
        if self._multipart is not None:
            return self._multipart.put(name, content, notes)
        import obstore

        failed: list[BaseException] = []

        def watched() -> Iterator[bytes]:
            try:
                yield from content.pieces()
            except BaseException as error:
                failed.append(error)
                raise

        def put() -> str | None:
            content.guard()  # not later: obstore can't be called while it asks for bytes
            try:
                put = obstore.put(
                    self._store, name, watched(), chunk_size=CHUNK_BYTES, max_concurrency=CONCURRENT_PARTS
                )
                return tag(put["e_tag"])
            except BaseException:
                if failed:
                    raise _Local(failed[0]) from None
                raise

        try:
            return self._try(name, put)
        except _Local as error:
            raise error.cause from None

    def put_folder(self, folder: Path, journal: Path, stage: Stage) -> Listing:
        """Put all files of a local folder under their names in it, the largest first.

        Args:
            journal: a file for notes about what was sent.

        Returns:
            What was put.

        Raises:
            Damaged: a file was changed meanwhile.
            OSError: it can't be read.
        """
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        listing = Listing({path.relative_to(folder).as_posix(): FileEntry.read(path) for path in paths})
        sent = Sent(journal, listing)
        done = stage(f"uploading to {self.url}", sum(entry.size for entry in listing.files.values()))
        for name, entry in sorted(listing.files.items(), key=lambda item: -item[1].size):
            content = UploadBody(folder / name, entry, on_bytes=done)
            if entry.size <= CHUNK_BYTES:
                self.put(name, b"".join(content.pieces()))
            else:
                self.put_parts(name, content, sent.parts(name))
        return listing

    def unfinished(self, prefix: str) -> "Sequence[Unfinished]":
        """The uploads in parts that were begun below `prefix`, and neither completed nor aborted.

        They are known of S3 only. `put_parts` goes on with those that this has returned.
        """
        return self._multipart.unfinished(prefix) if self._multipart is not None else []

    def abort(self, unfinished: "Unfinished") -> None:
        """Have the object store forget the parts of an upload."""
        if self._multipart is not None:
            self._multipart.abort(unfinished.name, unfinished.upload)

    def pieces(self, name: str, first: int, count: int) -> Iterator[memoryview]:
        """The bytes `first` to `first + count` of an object in turn, while they arrive.

        They end earlier only if the object does. A request that fails in the middle is made again for the
        bytes that are missing.
        """
        at, end = first, first + count

        def begin() -> tuple[memoryview | None, Iterator[memoryview]]:
            arriving = self._arriving(name, at, end)
            return next(arriving, None), arriving

        while at < end:
            piece, arriving = self._try(name, begin)
            with contextlib.suppress(TransientError):
                while piece is not None:
                    yield piece[: end - at]
                    at += len(piece)
                    piece = next(arriving, None)
                return

    def _arriving(self, name: str, at: int, end: int) -> Iterator[memoryview]:
        """What one request brings; errors are as for `_try`."""
        with self._errors(name):
            yield from self._source(name, at, end)

    def _source(self, name: str, at: int, end: int) -> Iterator[memoryview]:
        """One request for the bytes from `at` until `end`."""
        if self._folder is not None:
            return self._ranges(name, at, end)
        # obstore hands what arrives from one thread to another, which takes a quarter more processor time.
        # It alone makes requests without a signature.
        if self._s3 is not None and "AWS_SKIP_SIGNATURE" not in os.environ:
            return self._s3.stream(name, at, end, piece=PIECE_BYTES, seconds=REQUEST_SECONDS)
        return self._stream(name, at, end)

    def _stream(self, name: str, at: int, end: int) -> Iterator[memoryview]:
        import obstore

        answer = obstore.get(self._store, name, options={"range": (at, end)})
        yield from map(memoryview, answer.stream(min_chunk_size=PIECE_BYTES))

    def _ranges(self, name: str, at: int, end: int) -> Iterator[memoryview]:
        """As `_stream`; in folders obstore streams blocks of 8 kB, each read by another thread."""
        import obstore

        for first in range(at, end, PIECE_BYTES):
            yield memoryview(
                obstore.get_range(self._store, name, start=first, end=min(first + PIECE_BYTES, end))
            )

    def _past_obstore(self) -> "S3":
        """Requests of our own."""
        from obstore.store import S3Store

        from cairn.remote.client.s3 import S3

        assert isinstance(self._store, S3Store), "made for an s3:// URL"
        return S3(self.url, self._store, self._retry_seconds)

    def _within(self, s3: "S3") -> "tuple[ServerCopies, Multipart]":
        """ServerCopies with checksums, and uploads that go on where they ended; obstore has neither."""
        from cairn.remote.client.multipart import Multipart, ServerCopies

        copies = ServerCopies(s3)
        return copies, Multipart(s3, copies, self._has, CONCURRENT_PARTS)

    def _has(self, name: str, content: UploadBody) -> str | None:
        """The ETag of an object if it has this content; it is read in full."""
        found = self.look(name.rpartition("/")[0]).get(name)
        if found is None or found.size != content.size:
            return None
        same = all(
            crc64(self.read(name, number * CHUNK_BYTES, size)) == crc
            for number, (crc, size) in enumerate(chunks_of(content.entry))
        )
        return found.etag if same else None

    def modified(self, name: str) -> datetime:
        """When an object was put, by the clock of the object store."""
        import obstore

        return self._try(name, lambda: obstore.head(self._store, name)["last_modified"])

    def list(self, prefix: str = "") -> Sequence[tuple[str, int]]:
        """Names and sizes in bytes of the objects whose names begin with the folder `prefix`."""
        return [(name, found.size) for name, found in self.look(prefix).items()]

    def look(self, prefix: str) -> Mapping[str, Listed]:
        """What a list tells of these objects, by name."""
        self._look_anew(prefix)
        return self._try(prefix, lambda: listed(self._store, prefix))

    def folders(self) -> Sequence[str]:
        """The names of the folders below the URL; one request for every thousand."""
        self._look_anew("")
        return self._try("", lambda: folders(self._store))

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store, without reading it here."""
        import obstore

        self._try(source, lambda: obstore.copy(self._store, source, target))

    def copy_file(self, source: str, target: str, entry: FileEntry) -> str | None:
        """Copy an object that should have this content, and return the copy's ETag; None: it is to be sent.

        S3 tells whether the copy has the content; other stores copy whatever the object has.
        """
        if self._copies is not None:
            return self._copies.file(source, target, entry)
        import obstore

        def copy() -> str | None:
            try:
                obstore.copy(self._store, source, target)
            except FileNotFoundError:
                return None
            return tag(obstore.head(self._store, target)["e_tag"])

        return self._try(source, copy)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that does not exist is no error."""
        import obstore

        def delete(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

        for name in names:
            self._try(name, partial(delete, name))

    def make_durable(self, prefix: str) -> None:
        """Return when the objects in the folder `prefix` survive a power cut; real stores see to that."""
        if self._folder is None:
            return
        folder = self._folder / prefix
        with self._errors(prefix):
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)


class _Local(Exception):
    """Reading what should be uploaded has failed."""

    def __init__(self, cause: BaseException):
        super().__init__()
        self.cause = cause


# A look at an object store before a run relies on it.


MOST_SKEW = 300
"""Seconds by which the clocks may differ; S3 refuses requests from 15 minutes on."""


def probe(objects: Objects, owner: str) -> None:
    """Check that objects can be written, read, listed and deleted, only if they are new, and the clock.

    Raises:
        RemoteError: something fails; the message says what it is needed for.
    """
    name, content = f"probe/{owner}", os.urandom(16)
    objects.delete([name])
    objects.put_new(name, content)
    if objects.get(name) != content:
        raise RemoteError(f"{objects.url}/{name}: reads differently from what was written")
    try:
        objects.put_new(name, b"another content")
    except Exists:
        pass
    else:
        raise RemoteError(
            f"{objects.url}: ignores the condition If-None-Match, so two runs could commit the same step; "
            "use a store that knows it"
        )
    if name not in [found for found, _ in objects.list("probe")]:
        raise RemoteError(f"{objects.url}/{name}: was written, but is not listed")
    skew = (objects.modified(name) - datetime.now(UTC)).total_seconds()
    if abs(skew) > MOST_SKEW:
        raise RemoteError(
            f"{objects.url}: its clock and this machine's differ by {abs(skew):.0f} s; set the clock"
        )
    objects.delete([name])
    if objects.get(name) is not None:
        raise RemoteError(
            f"{objects.url}/{name}: was deleted, but is still there; old steps could not be removed"
        )
