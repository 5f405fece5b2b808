"""Policy versions in an object store, for servers that see no files of the run.

Below `policies/` in the URL of the run's object store lies `<process>/v<step>/`, with the files that the
version's folder has, and `policy.json`, put last, with each file's size and checksums. A version exists if
and only if its `policy.json` does. The prefix of a trainer process holds what its deltas are relative to,
since the first version of a process is whole.

A server downloads the files that make the policy of the one it has into folders with the same names beside
each other. From then on they are what a shared folder would hold: checksums of tensors, deltas and all.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import FileEntry
from cairn.policy.errors import Altered, NotThere
from cairn.run.files import DamagedFile
from cairn.run.messages import FOLDER, DeltaNote, read_delta_note
from cairn.run.object_store import ObjectReader, RemoteError, TransientError
from cairn.run.waiting import Backoff

LIST = "policy.json"
FILES = TypeAdapter(dict[str, FileEntry])
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TRIES = 3
"""How often a piece of a file is asked for that arrives with another checksum."""
AT_A_TIME = 8
"""Pieces of 16 MiB that are on their way at the same time."""
RETRY_SECONDS = 30.0
"""How long a failing request is repeated; then the pool gives the server the policy again later."""

T = TypeVar("T")


@dataclass(frozen=True)
class Downloaded:
    """A version's folder on this machine. nbytes: of the files that were downloaded for it."""

    folder: Path
    nbytes: int


class PolicyDownloads:
    """Downloads versions. It keeps the newest one and what that is made of, for the next to be made of it.

    Args:
        make_root: makes the folder to put them in, which nothing else uses; called when it is first needed.
    """

    def __init__(self, make_root: Callable[[], Path]):
        self._make_root = make_root
        self._root: Path | None = None
        self._whole: dict[str, Path] = {}
        """The versions of which all files are here, by URL."""

    def fetch(self, url: str, has: str = "") -> Downloaded:
        """Download the version at `url`, for who has the policy with the digest `has`, if any.

        Raises:
            Altered: something is missing, or is not what the trainer has put there.
            NotThere: the object store does not answer.
            RemoteError: it refuses.
            UsageError: the URL can't be used.
            OSError: there is no room for the files.
        """
        self._root, nbytes = self._root or self._make_root(), 0
        process, _, newest = url.rstrip("/").rpartition("/")
        beside, chain = self._root / process.rpartition("/")[2], list[str]()
        wanted: str | None = newest
        if not NAME.fullmatch(beside.name):
            raise Altered(f"{url}: is not where a trainer puts a policy")
        while wanted is not None:
            if not FOLDER.fullmatch(wanted) or wanted in chain:
                raise Altered(f"{url}: a delta of its chain is relative to {wanted!r}")
            chain.append(wanted)
            where, folder = f"{process}/{wanted}", beside / wanted
            if where not in self._whole:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                nbytes += self._download(where, folder, has)
            note = _delta_of(folder)
            ends = note is None or has in (note.digest, note.base_digest)
            wanted = None if ends or note is None else note.base
        self._keep({beside / name for name in chain})
        return Downloaded(beside / newest, nbytes)

    def clear(self) -> None:
        """Delete what was downloaded."""
        self._keep(set())

    def _keep(self, needed: set[Path]) -> None:
        """Delete all other versions' folders."""
        self._whole = {url: folder for url, folder in self._whole.items() if folder in needed}
        for folder in self._root.glob("*/*") if self._root is not None else ():
            if folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _download(self, url: str, folder: Path, has: str) -> int:
        """Download a version's files, but for its delta if that makes what is there already; returns their
        bytes."""
        version = _Version(url, folder)
        nbytes = version.fetch({name for name in version.files if name.endswith(".json")})
        note = _delta_of(folder)
        if note is None or note.digest != has:
            nbytes += version.fetch({name for name in version.files if not name.endswith(".json")})
            self._whole[url] = folder
        return nbytes


def _delta_of(folder: Path) -> DeltaNote | None:
    """What a version is relative to; None: it is whole."""
    try:
        return read_delta_note(folder)
    except DamagedFile as error:
        raise Altered(str(error)) from None


class _Version:
    """A version in the object store, whose files go into a folder here.

    Raises:
        Altered, NotThere, RemoteError: as `PolicyDownloads.fetch`, which holds for each method.
    """

    def __init__(self, url: str, folder: Path):
        self._objects = ObjectReader(url, retry_seconds=RETRY_SECONDS)
        self._folder = folder
        listed = self._asked(lambda: self._objects.get(LIST))
        if listed is None:
            raise Altered(f"{url}: is not there")
        try:
            self.files = FILES.validate_json(listed)
        except ValidationError:
            raise Altered(f"{url}/{LIST}: does not say what files there are") from None
        if odd := [name for name in self.files if not NAME.fullmatch(name) or name == LIST]:
            raise Altered(f"{url}/{LIST}: {odd[0]!r} is no name of a policy's file")

    def fetch(self, names: set[str]) -> int:
        """Download these of its files; returns their bytes."""
        chosen = {name: self.files[name] for name in sorted(names)}
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            pieces: list[Future[None]] = []
            for name, entry in chosen.items():
                with open(self._folder / name, "wb") as file:
                    file.truncate(entry.size)
                numbers = range(len(entry.crc64nvme))
                pieces += [threads.submit(partial(self._piece, name, entry, number)) for number in numbers]
            try:
                for piece in pieces:
                    piece.result()
            finally:
                for piece in pieces:
                    piece.cancel()
        return sum(entry.size for entry in chosen.values())

    def _piece(self, name: str, entry: FileEntry, number: int) -> None:
        first = number * CHUNK_BYTES
        count = min(CHUNK_BYTES, entry.size - first)
        backoff = Backoff()
        for _ in range(TRIES):
            time.sleep(backoff.seconds)
            content = self._asked(partial(self._objects.read, name, first, count), name)
            if len(content) == count and crc64(content) == int(entry.crc64nvme[number], 16):
                break
            backoff.grow()
        else:
            where = f"{self._objects.url}/{name}: bytes {first} to {first + count}"
            raise Altered(f"{where} are not those that the trainer has put there (other checksum)")
        with open(self._folder / name, "r+b", buffering=0) as file:
            at = 0
            while at < count:
                at += os.pwrite(file.fileno(), content[at:], first + at)

    def _asked(self, request: Callable[[], T], name: str = "") -> T:
        """The answer to a request, for the object `name` if one must be there."""
        try:
            return request()
        except TransientError as error:
            raise NotThere(str(error)) from None
        except RemoteError:
            if name and self._objects.size(name) is None:
                raise Altered(f"{self._objects.url}/{name}: is not there") from None
            raise
