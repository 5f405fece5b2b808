"""What kind of file system a folder is on, and what network file systems need done otherwise.

Machines that share a folder over NFS or the like have caches: a name that was looked for in vain may stay
unknown for a minute. Locks may be refused, or hold on one machine only. SQLite's WAL needs shared memory.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cairn.run.errors import UsageError

# What can be done to files in a folder: found by doing it, since mounts don't tell.


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


MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    (
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "pvfs2", "wekafs"),
        *("virtiofs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs"),
        *("fuse.beegfs", "fuse.mfs", "fuse.moosefs", "fuse.seaweedfs", "fuse.quobyte"),
    )
)
"""The kernel's names of file systems whose files other machines change too."""
ONE_MACHINES_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.lxcfs"))
"""FUSE's file systems that containers have of their own. All others of FUSE's may be shared, known or not."""
BUCKETS = frozenset(
    f"fuse.{name}"
    for name in (
        *("s3fs", "mountpoint-s3", "goofys", "gcsfuse", "blobfuse", "blobfuse2", "rclone", "geesefs"),
        "ossfs",
    )
)
"""Object stores mounted as folders, which neither append to files nor rename or lock them properly."""
ONE_MACHINES_LOCKS = frozenset(("nolock", "local_lock=all", "local_lock=flock", "localflock"))
"""Mount options with which locks are kept on this machine, where others don't see them."""
NO_LOCKS = frozenset((errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK))

SLOW_SECONDS = 1.0
"""A file system that takes longer for a small file delays what roles tell each other by files."""
SLOW_TRANSACTION = 0.02
"""Seconds of a transaction of SQLite that are worth a warning: an RL run has one for each answer."""
TRANSACTIONS = 5
"""Of which the median is taken."""
LOOK_SECONDS = 0.1
"""The server is asked at most so often what is new in a folder; whoever waits for a file looks more often."""

AT_FDCWD, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS = -100, 0x2000, 0x7FF
STATX_BYTES = 256

LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system: the kernel's name of its kind, where it is mounted, and with which options."""

    kind: str
    mount: str
    options: frozenset[str]

    @property
    def is_network(self) -> bool:
        """Whether other machines may change its files."""
        return self.kind in NETWORK or (self.is_fuse and self.kind not in ONE_MACHINES_FUSE)

    @property
    def is_fuse(self) -> bool:
        """Whether a program serves it, whose name the kernel knows only if the program says it."""
        return self.kind == "fuse" or self.kind.startswith("fuse.")

    @property
    def locks_here_only(self) -> bool:
        """Whether a lock keeps out processes of this machine only."""
        return self.is_network and not self.options.isdisjoint(ONE_MACHINES_LOCKS)

    def __str__(self) -> str:
        return f"{self.kind}, mounted at {self.mount}"


@functools.lru_cache(4096)
def file_system_of(path: Path) -> FileSystem:
    """The file system that `path` is on, or will be once it exists."""
    place = os.path.realpath(path)
    found = FileSystem("unknown", "/", frozenset())
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount, options = (_unescaped(field) for field in fields.split()[4:6])
        kind, source, *of_kind = rest.split()
        if kind == "fuse" and f"fuse.{source}" in BUCKETS:
            kind = f"fuse.{source}"
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(
            found.mount
        ):  # of mounts at one place, the last one covers the others
            found = FileSystem(kind, mount, frozenset(",".join([options, *of_kind]).split(",")))
    return found


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


# Files that another machine makes


def appears(path: Path) -> bool:
    """Whether a file exists, also one that another machine has just made."""
    return path.exists() or (look_anew(path.parent) and path.exists())


_looked: dict[Path, float] = {}


def look_anew(folder: Path) -> bool:
    """On a network file system, ask the server what is in a folder; returns whether another look is worth it.

    Does nothing for local file systems, nor within LOOK_SECONDS of the last time.
    """
    if not file_system_of(folder).is_network:
        return False
    now = time.monotonic()
    if now - _looked.get(folder, -LOOK_SECONDS) < LOOK_SECONDS:
        return False
    _looked[folder] = now
    if not _synchronise(folder) and folder != folder.parent:  # it may itself be new
        look_anew(folder.parent)
        _synchronise(folder)
    return True


def _synchronise(path: Path) -> bool:
    """Have the attributes of `path` come from the server; whether it exists.

    If a folder has changed, the kernel forgets which names are not in it.
    """
    buffer = ctypes.create_string_buffer(STATX_BYTES)
    return not LIBC.statx(AT_FDCWD, os.fsencode(path), AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, buffer)


def parts_of_pages(path: Path) -> int:
    """The flags of os.open for a file of which several machines may write parts of one page.

    With O_DSYNC an NFS client sends the bytes that were written, and never the rest of the page as it
    remembers it.
    """
    return os.O_DSYNC if file_system_of(path).is_network else 0


# Locks


def flock(fd: int, operation: int, path: Path) -> None:
    """`fcntl.flock`, for the file `path`; NFS takes exclusive locks of files open for writing only.

    Raises:
        BlockingIOError: somebody else holds it, and `operation` does not wait.
        UsageError: the file system has no locks; the message says what to do.
    """
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        found = file_system_of(path)
        remedy = "choose a folder elsewhere"
        if found.kind == "lustre":
            remedy = f"mount it with -o flock, or {remedy}"
        elif found.kind.startswith("nfs"):
            remedy = f"mount it with NFS 4, or run rpc.statd for NFS 3, or {remedy}"
        raise UsageError(
            f"{path}: its file system ({found}) has no locks ({error.strerror}), by which a folder is kept "
            f"for one command at a time: {remedy}"
        ) from None


def open_lock(path: Path) -> int:
    """A descriptor of the file `path`, made if need be, to be locked: NFS and Lustre can't lock a folder."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


# SQLite


def journal_mode(path: Path) -> str:
    """SQLite's journal for a database at `path`.

    WAL needs memory that all machines share; the other mode works wherever locks of bytes do.
    """
    return "TRUNCATE" if file_system_of(path).is_network else "WAL"


def transaction_seconds(folder: Path) -> float | None:
    """What a transaction takes of a database that `folder`, perhaps not made yet, will hold.

    Returns:
        Seconds; None if nothing may be written there.

    Raises:
        UsageError: SQLite can't lock or write there.
    """
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        temporary = tempfile.TemporaryDirectory(dir=place, prefix=".cairn-probe-")
    except OSError:  # whoever needs the folder says what is wrong with it
        return None
    with temporary as name:
        path = Path(name) / "probe.sqlite"
        times: list[float] = []
        try:
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.execute(f"PRAGMA journal_mode = {journal_mode(path)}")
                database.execute("PRAGMA synchronous = NORMAL")
                database.execute("CREATE TABLE answers (number)")
                for number in range(TRANSACTIONS):
                    began = time.monotonic()
                    with database:
                        database.execute("INSERT INTO answers VALUES (?)", (number,))
                    times.append(time.monotonic() - began)
        except sqlite3.Error as error:
            raise UsageError(
                f"{folder}: SQLite, in which an RL run keeps its answers, can't work on its file system "
                f"({file_system_of(folder)}): {error}. It needs locks of bytes of a file (fcntl), which some "
                "mounts lack: choose a folder elsewhere"
            ) from None
    return statistics.median(times)


# A look at a folder before a run relies on it


def probe(folder: Path) -> float | None:
    """Try out the file system that `folder`, perhaps not made yet, will be on.

    Returns:
        The seconds until a small new file is durable and the server has been asked for it; None if nothing
        may be written there.

    Raises:
        UsageError: it grants one lock twice, or has none; or it is a bucket.
    """
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    began = time.monotonic()
    try:
        fd, name = tempfile.mkstemp(dir=place, prefix=".cairn-probe-")
    except OSError:  # whoever needs the folder says what is wrong with it
        return None
    path = Path(name)
    try:
        os.write(fd, b"probe")
        os.fsync(fd)
        _synchronise(path)
        seconds = time.monotonic() - began
        found = file_system_of(folder)
        if what := lacking(place, links=found.is_fuse and found.kind not in NETWORK):
            raise _a_bucket(folder, f"{found}, which can't {what}")
        if _excludes(fd, path):
            return seconds
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    raise UsageError(
        f"{folder}: its file system ({file_system_of(folder)}) grants one lock twice, so nothing would keep "
        "two commands out of one folder: choose a folder elsewhere"
    )


def _a_bucket(folder: Path, about: object) -> UsageError:
    return UsageError(
        f"{folder} is in a bucket that is mounted as a folder ({about}), where files can't be appended to, "
        "renamed or locked as a run needs it: choose a folder on a disk, and give the bucket's address as "
        "--ckpt.remote, such as s3://bucket/prefix"
    )


def _excludes(fd: int, path: Path) -> bool:
    """Whether a lock of the file keeps out who opens it a second time.

    Raises:
        UsageError: the file system has no locks.
    """
    flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    again = open_lock(path)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(again)


def remarks(folders: Iterable[Path]) -> list[str]:
    """What is done otherwise for those of the folders that are on network file systems, in words.

    Raises:
        UsageError: a folder can't be used: it is a bucket, or its file system has no locks that hold.
    """
    said: list[str] = []
    for folder in folders:
        found = file_system_of(folder)
        if found.kind in BUCKETS:
            raise _a_bucket(folder, found)
        if not found.is_network:
            continue
        seconds, transaction = probe(folder), transaction_seconds(folder)
        taken = "" if seconds is None else f". A small file took {1000 * seconds:.0f} ms there"
        taken += "" if transaction is None else f", and a transaction of SQLite {1000 * transaction:.0f} ms"
        known = "is on a network file system" if found.kind in NETWORK else "may be on a network file system"
        said.append(
            f"{folder} {known} ({found}): the server is asked for new files of other machines, SQLite keeps "
            f"a rollback journal instead of WAL, and parts of pages are written through{taken}"
        )
        if seconds is not None and seconds > SLOW_SECONDS:
            said.append(
                f"warning: roles tell each other things by files, and wait about {seconds:.1f} s each time; "
                "if they are all on one machine, put --output-dir on its disk and only --ckpt.dir here"
            )
        if transaction is not None and transaction > SLOW_TRANSACTION:
            said.append(
                f"warning: in RL each answer is a transaction of the ledger: 1000 answers keep the "
                f"orchestrator for {1000 * transaction:.0f} s there; if all roles are on one machine, put "
                "--output-dir on its disk and only --ckpt.dir here"
            )
        if found.locks_here_only:
            options = ", ".join(sorted(found.options & ONE_MACHINES_LOCKS))
            said.append(
                f"warning: {found.mount} is mounted with {options}: locks hold on this machine only, so that "
                f"nothing keeps a command on another machine out of {folder}"
            )
    return list(dict.fromkeys(said))
