"""What can be done to files in a folder: found by doing it, since mounts don't tell."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

NO_LINKS = frozenset((errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM))
"""Errors of a file system that has no hard links; which of them depends on the kernel as well."""


def lacking(place: Path, *, links: bool) -> str | None:
    """What can't be done to files in the folder `place`, though a run relies on it; None if all works.

    Args:
        links: hard links as well. No run relies on them, but a bucket has none whatever program mounts it,
            and some of those programs append, rename and lock, for this machine, as a file system does.

    Raises:
        OSError: nothing may be written there.
    """
    trials: dict[str, Callable[[Path], bool]] = {
        "append to a file": _appends,
        "change bytes in the middle of a file": _changes,
        "replace a file by renaming another one": _replaces,
    }
    if links:
        trials["link a file (as buckets can't)"] = _links
    with tempfile.TemporaryDirectory(dir=place, prefix=".cairn-probe-") as folder:
        for number, (what, works) in enumerate(trials.items()):
            path = Path(folder) / f"{number}"
            path.write_bytes(b"content")
            try:
                if not works(path):
                    return what
            except OSError as error:
                return f"{what}: {error.strerror}"
    return None


def _appends(path: Path) -> bool:
    with open(path, "ab") as file:
        file.write(b" and more")
    return path.read_bytes() == b"content and more"


def _changes(path: Path) -> bool:
    with open(path, "r+b") as file:
        file.seek(3)
        file.write(b"T")
    return path.read_bytes() == b"conTent"


def _replaces(path: Path) -> bool:
    other = path.with_name("other")
    other.write_bytes(b"other")
    os.replace(other, path)
    return path.read_bytes() == b"other" and not other.exists()


def _links(path: Path) -> bool:
    try:
        os.link(path, path.with_name("link"))
    except OSError as error:
        return error.errno not in NO_LINKS
    return True
