"""The chunks of a step's files, on their way from an object store."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64
from cairn.checkpoint.manifest import Damaged, Manifest, check_crc
from cairn.remote.client.objects import Objects
from cairn.run.files import naming

Place = tuple[str, int]
"""The name of a file, and the number of one of its chunks."""


def places(manifest: Manifest) -> Iterator[Place]:
    """File and number of every chunk of a step.

    Files take turns, since a file system lets one thread at a time write to a file.
    """
    found = ((name, chunk) for name, entry in manifest.files.items() for chunk in range(len(entry.crc64nvme)))
    yield from sorted(found, key=lambda place: place[1])


def check(objects: Objects, manifest: Manifest, place: Place) -> int:
    """Read a chunk, and compare it with the manifest; returns its size in bytes.

    Raises:
        Damaged: the object is not what the manifest says.
        RemoteError: the object store refuses or fails.
    """
    return _read(objects, manifest, place, lambda piece, at: None)


def copy(objects: Objects, manifest: Manifest, place: Place, folder: Path) -> int:
    """Write a chunk into its file, which is there, below `folder`; returns its size in bytes.

    Each piece is compared and written while it is in the processor's cache.

    Raises:
        Damaged: the object is not what the manifest says; the file has the wrong bytes then.
        RemoteError: the object store refuses or fails.
        OSError: the file can't be written; the error names it.
    """
    name, chunk = place
    with naming(folder / name), open(folder / name, "r+b", buffering=0) as file:
        count = _read(objects, manifest, place, lambda piece, at: _write_all(file.fileno(), piece, at))
        # The disk begins to write it now, while other chunks arrive, rather than at the fsync.
        os.posix_fadvise(file.fileno(), chunk * CHUNK_BYTES, count, os.POSIX_FADV_DONTNEED)
    return count


def _read(objects: Objects, manifest: Manifest, place: Place, take: Callable[[memoryview, int], None]) -> int:
    """Read a chunk whose checksum is right; returns its size in bytes.

    Args:
        take: called with each piece as it arrives, and its place in the file; with all of them once more if
            the chunk turns out wrong.
    """
    name, chunk = place
    entry, key, first = manifest.files[name], f"step_{manifest.step}/{name}", chunk * CHUNK_BYTES
    count = min(CHUNK_BYTES, entry.size - first)
    url = f"{objects.url}/{key}"
    for last in (False, True):
        at, crc = first, 0
        for piece in objects.pieces(key, first, count):
            crc = crc64(piece, crc)
            take(piece, at)
            at += len(piece)
        try:
            check_crc(Path(url), entry, chunk, crc)
            return count
        except Damaged as error:
            if last:  # the object is damaged, not what came over the network
                raise Damaged(str(error).replace(str(Path(url)), url)) from None
    raise AssertionError


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
