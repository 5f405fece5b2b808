"""What an object store has already of a step that is to be uploaded: content that can be copied there."""

import contextlib
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import CheckpointError, FileEntry, Manifest, split_step
from cairn.checkpoint.tiers import Tier
from cairn.remote.client.upload_body import Chunk, ObjectRange, chunks_of
from cairn.run.errors import UsageError
from cairn.run.object_store import RemoteError

WORTH_COPYING = 1 << 20
"""Smaller files are sent again rather than copied within the object store."""
MOST_COPIED = 5 << 30
"""The largest object that S3 copies in one request; larger ones are copied by chunks."""


class Known:
    """Files and chunks of steps in one bucket, by their content."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, tuple[str, ...]], str] = {}
        self._chunks: dict[Chunk, ObjectRange] = {}

    def add(self, url: str, manifest: Manifest, *, files: bool) -> None:
        """Add the chunks of a step below `url`, and its whole files if that is where the upload goes."""
        for file, entry in manifest.files.items():
            name = f"step_{manifest.step}/{file}"
            if files:
                self._files[_content(entry)] = name
            if entry.size > CHUNK_BYTES:  # S3 copies no ranges of small objects
                for number, chunk in enumerate(chunks_of(entry)):
                    self._chunks[chunk] = ObjectRange(url, name, number * CHUNK_BYTES)

    def file(self, entry: FileEntry) -> str | None:
        """The name of an object with this content that one request copies."""
        return self._files.get(_content(entry)) if WORTH_COPYING <= entry.size <= MOST_COPIED else None

    def place(self, chunks: Sequence[Chunk]) -> ObjectRange | None:
        """Where these chunks lie in a row; None if that is not known."""
        start, at = None, 0
        for chunk in chunks:
            found = self._chunks.get(chunk)
            start, at = (found, found.first) if found and start is None else (start, at)
            if found is None or start is None or found != ObjectRange(start.url, start.name, at):
                return None
            at += chunk[1]
        return start


def known_there(remote: Tier, url: str, origin: str | None, tier_at: Callable[[str], Tier]) -> Known:
    """What the newest step has; if there is none, the step that the run was forked from.

    Args:
        url: of `remote`.
        origin: the URL of that step, which counts if it is in the same bucket of S3.
        tier_at: makes the store of the run that has it, from its URL.

    Raises:
        RemoteError: the object store refuses or fails.
    """
    known = Known()
    for step in reversed(remote.steps()):
        with contextlib.suppress(CheckpointError):
            known.add(url, remote.manifest(step), files=True)
            return known
    if found := split_step(origin or ""):
        prefix, step = found
        here, there = urlsplit(url), urlsplit(prefix)
        if ("s3", here.netloc) == (there.scheme, there.netloc):
            # It only saves bytes: it may have been deleted, or not be permitted.
            with contextlib.suppress(CheckpointError, RemoteError, UsageError):
                known.add(prefix, tier_at(prefix).manifest(step), files=False)
    return known


def _content(entry: FileEntry) -> tuple[int, tuple[str, ...]]:
    return entry.size, tuple(entry.crc64nvme)
