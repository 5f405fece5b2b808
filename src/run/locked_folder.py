"""The lock of a folder that one process at a time takes for itself, such as a run directory."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from cairn.run.errors import UsageError
from cairn.run.file_system import file_system_of, flock, look_anew, open_lock
from cairn.run.waiting import POLL_SECONDS, Patience

LOOKERS_SECONDS = 10.0
"""How long a launcher waits for whoever only looks whether a run directory is locked, which takes an instant
unless that process is stopped in it."""
LEASE_SECONDS = 120.0
"""How long a lock may outlive the machine that held it: a file server can't tell that the machine is gone
before its lease ends, with NFS 4 after 90 s by default."""
LOCK_POLL_SECONDS = 1.0


class LockedFolder:
    """The folder at `path`, which a process may lock for itself, and others see that it has.

    The process may also note that it has begun its work: a second lock, which it holds until it lets the
    first one go.
    """

    def __init__(self, path: Path):
        self.path = path
        self._begun_lock = path / ".begun.lock"
        self._begun: int | None = None
        self._lock: int | None = None

    def lock(self) -> bool:
        """Keep other launchers out until `unlock`, or this process's end; False if one is at work already.

        Raises:
            UsageError: the file system has no locks.
        """
        if self._lock is not None:
            return True
        path = self.path / ".lock"
        fd = open_lock(path)  # closes with the process
        patience = Patience(LOOKERS_SECONDS)
        while not patience.over:
            with contextlib.suppress(BlockingIOError):
                flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
                if not _is_at(fd, path):  # the lock is of a file, and the promise about a path
                    os.close(fd)
                    fd = open_lock(path)
                    continue
                self._lock = fd
                return True
            try:  # whoever only looks, as `is_locked` does, shares it
                flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, path)
            except BlockingIOError:
                break
            flock(fd, fcntl.LOCK_UN, path)
            time.sleep(POLL_SECONDS)
        os.close(fd)
        return False

    def has_moved(self) -> bool:
        """Whether the folder that this process has locked is not the one at `path` any more.

        It was moved, removed or replaced, and another process may be at work in what is there now.
        """
        return self._lock is not None and not _is_at(self._lock, self.path / ".lock")

    def unlock(self) -> None:
        """Let other launchers in again."""
        for fd in (self._begun, self._lock):
            if fd is not None:
                os.close(fd)
        self._begun = self._lock = None

    def is_locked(self) -> bool:
        """Whether a launcher, this process or another, is at work here."""
        return self._is_held(self.path / ".lock")

    def _is_held(self, path: Path) -> bool:
        try:
            look_anew(self.path)
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, path)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def note_begun(self) -> None:
        """If this process has the lock, let others see that what they find here now is its own."""
        if self._lock is not None and self._begun is None:
            self._begun = open_lock(self._begun_lock)
            flock(self._begun, fcntl.LOCK_EX, self._begun_lock)  # whoever only looks holds it for an instant

    def has_begun(self) -> bool:
        """Whether a process that is at work here has noted so."""
        return self._is_held(self._begun_lock)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one at this path; also if that can't be found out now."""
    try:
        there, opened = os.stat(path), os.fstat(fd)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a server that does not answer
        return True
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def lock(run: LockedFolder) -> None:
    """Keep other commands out of the run directory until `unlock`, or this process's end.

    On a file system that machines share, a lock that is held is waited for: the machine that holds it may
    have been taken away.

    Raises:
        UsageError: another process is running in it; or the file system has no locks.
    """
    if run.lock():
        return
    found = file_system_of(run.path)
    if found.is_network:
        print(
            f"{run.path} is locked. On its file system ({found}) the lock of a machine that was taken away "
            f"remains for a while: waiting for it, for up to {LEASE_SECONDS:g} s",
            flush=True,
        )
        patience = Patience(LEASE_SECONDS)
        while not patience.over:
            time.sleep(LOCK_POLL_SECONDS)
            if run.lock():
                return
    raise UsageError(f"--output-dir {run.path}: another process is running in it")
