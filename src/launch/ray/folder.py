"""Private folders for Ray's files and sockets.

Ray makes all its files accessible to every user, so they are placed in a folder that only this user can
enter.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "cairn-ray-"
LONGEST_SOCKET = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path that Ray appends to its folder for a socket; the kernel allows 107 bytes in all."""
LONGEST_FOLDER = 107 - len(LONGEST_SOCKET)


def make_private_folder() -> Path:
    """Make a folder (mode 0700) for this process, with a path short enough for Ray's sockets.

    It stays locked while this process lives; `remove_private_folders` removes it afterwards.

    Raises:
        OSError: no temporary folder is writable.
    """
    remove_private_folders()
    for place in _places():
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            if _lock(folder) is not None:  # held until this process ends
                return folder
    raise OSError(f"no folder for temporary files is writable; tried {', '.join(map(str, _places()))}")


def remove_private_folders() -> None:
    """Remove the folders of processes that have ended."""
    for place in _places():
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                if (lock := _lock(folder)) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _places() -> list[Path]:
    """Folders in which to make it, best first."""
    wanted = [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp", "/var/tmp"]
    room = LONGEST_FOLDER - len(f"/{PREFIX}12345678/r")
    return [Path(place) for place in dict.fromkeys(wanted) if place and len(os.fsencode(place)) <= room]


def _lock(folder: Path) -> int | None:
    """A locked descriptor of the folder; None if a living process holds the lock or the folder is gone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == os.fstat(fd).st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
