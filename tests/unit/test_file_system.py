"""What is done otherwise on network file systems, whose kind is made up here: there is no server."""

import errno
import fcntl
import math
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.direct_io import direct_file
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.ledger.reading import open_ledger
from cairn.remote import Objects
from cairn.run import file_system, locked_folder
from cairn.run.batches import read_origin
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.file_system import appears, file_system_of, look_anew, remarks
from cairn.run.files import entries, read_json, read_note
from cairn.run.messages import Attempt

RUN = LedgerRun("run", "branch_1", FORMAT, 0, 100, 2, 2, 1)
ATTEMPT = Attempt("run", 1, "sft", 0, None, "branch_1")

Mount = Callable[..., None]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    """`mount(kind, options)`: have the kernel say that the test's folder is on such a file system."""

    def mount(kind: str, options: str = "rw,relatime") -> None:
        table = tmp_path.parent / f"{tmp_path.name}.mountinfo"
        place = str(tmp_path).replace(" ", "\\040")
        table.write_text(
            "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
            f"23 22 0:5 / {place} {options} shared:7 - {kind} server:/export rw,vers=4.2,{options}\n"
            f"24 22 0:6 / {place}2 rw - tmpfs tmpfs rw\n"
        )
        monkeypatch.setattr(file_system, "MOUNTS", table)
        file_system_of.cache_clear()
        monkeypatch.setattr(file_system, "_looked", {})
        for name in ("SLOW_SECONDS", "SLOW_TRANSACTION"):  # the machine may be busy
            monkeypatch.setattr(file_system, name, math.inf)

    yield mount
    file_system_of.cache_clear()


def test_the_innermost_mount_counts(tmp_path: Path, mount: Mount):
    mount("nfs4")
    assert file_system_of(tmp_path / "not" / "there yet").kind == "nfs4"
    assert file_system_of(tmp_path).mount == str(tmp_path)
    assert file_system_of(Path(f"{tmp_path}2")).kind == "tmpfs"
    assert file_system_of(Path(f"{tmp_path}3")).kind == "ext4"
    (tmp_path / "link").symlink_to("/")
    assert file_system_of(tmp_path / "link" / "etc").kind == "ext4"


def test_this_machines_file_system_is_known(tmp_path: Path):
    file_system_of.cache_clear()
    found = file_system_of(tmp_path)
    assert found.kind != "unknown"
    assert str(tmp_path.resolve()).startswith(found.mount)
    assert file_system_of(Path("/proc/self")).kind == "proc"


def test_only_network_file_systems_are_remarked_on(tmp_path: Path, mount: Mount):
    mount("xfs")
    assert remarks([tmp_path]) == []
    mount("nfs4")
    (remark, again) = remarks([tmp_path, tmp_path / "not" / "there yet"])
    assert f"{tmp_path} is on a network file system (nfs4, mounted at {tmp_path})" in remark
    assert re.search(r"SQLite keeps a rollback journal .*\. A small file took \d+ ms there, and a", remark)
    assert re.search(r"a transaction of SQLite \d+ ms$", remark)
    assert "there yet is on a network file system" in again
    assert list(tmp_path.iterdir()) == []
    mount("nfs", "rw,local_lock=all")
    assert "local_lock=all: locks hold on this machine only" in remarks([tmp_path])[1]


def test_a_slow_server_is_warned_of(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch):
    """Batches, weights and heartbeats are files there."""
    mount("nfs4")
    monkeypatch.setattr(file_system, "SLOW_SECONDS", 0.05)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.1) or real(fd))
    assert re.match(r"warning: roles .* and wait about \d+\.\d s each time", remarks([tmp_path])[1])


def test_slow_transactions_are_warned_of(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch):
    """There is one for each answer."""
    mount("nfs4")
    monkeypatch.setattr(file_system, "SLOW_TRANSACTION", 0.0)
    assert re.match(r"warning: in RL each answer .*: 1000 answers keep .* for \d+ s", remarks([tmp_path])[1])


def test_a_file_system_without_locks_of_bytes_is_refused(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
):
    """As some mounts of SMB and FUSE are: locks of whole files hold there, and SQLite's do not."""
    mount("cifs")

    def refuse(path: Path) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises(
        UsageError, match=r"\(cifs, mounted at .*\): database is locked\. It needs locks of by"
    ):
        remarks([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_locks_that_keep_nobody_out_are_refused(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
):
    mount("nfs4")
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    with pytest.raises(UsageError, match="grants one lock twice"):
        remarks([tmp_path])


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("fuse.gcsfuse bucket", True),
        ("fuse mountpoint-s3", True),
        ("fuse.s3fs s3fs", True),
        ("fuse.ossfs ossfs", True),
        ("fuse.blobfuse blobfuse", True),
        ("fuse.juicefs JuiceFS:runs", False),
        ("fuse /dev/fuse", False),
    ],
)
def test_a_bucket_as_a_folder_is_refused(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch, line: str, refused: bool
):
    """Its address is what Cairn wants."""
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / {tmp_path}/b rw - {line} rw\n")
    mount("ext4")
    monkeypatch.setattr(file_system, "MOUNTS", table)
    if not refused:
        remarks([tmp_path / "b" / "run"])
        return
    with pytest.raises(UsageError, match="give the bucket's address"):
        remarks([tmp_path / "b" / "run"])


def refuses(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("kind", ["fuse", "fuse.of-tomorrow"])
@pytest.mark.parametrize(
    ("call", "number", "what"),
    [
        ("link", errno.ENOSYS, "can't link a file"),
        ("link", errno.EPERM, "can't link a file"),
        ("replace", errno.ENOSYS, "can't replace a file by renaming another one: Function not implemented"),
    ],
)
def test_a_bucket_is_known_by_what_it_can_not(
    tmp_path: Path,
    mount: Mount,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    call: str,
    number: int,
    what: str,
):
    """Where its program does not tell the kernel its name: on GKE the source is that of the bucket."""
    mount(kind)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuses(number))
        with pytest.raises(UsageError, match=f"is in a bucket .*{what}"):
            remarks([tmp_path])
    assert list(tmp_path.iterdir()) == []
    assert "may be on a network file system" in remarks([tmp_path])[0]


def test_a_share_without_hard_links_is_no_bucket(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
):
    """As some of SMB and SSH are."""
    monkeypatch.setattr(os, "link", refuses(errno.EOPNOTSUPP))
    for kind in ("cifs", "fuse.sshfs"):
        mount(kind)
        assert "is on a network file system" in remarks([tmp_path])[0]


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        *[
            (kind, True)
            for kind in ("fuse.ceph-fuse", "virtiofs", "fuse.moosefs", "fuse", "fuse.of-tomorrow")
        ],
        *[(kind, False) for kind in ("ext4", "overlay", "fuseblk", "fuse.fuse-overlayfs")],
    ],
)
def test_what_may_be_shared_is_taken_for_shared(tmp_path: Path, mount: Mount, kind: str, shared: bool):
    """A rollback journal and a look at locks cost little; a WAL that two machines map costs the ledger."""
    mount(kind)
    assert file_system_of(tmp_path).is_network == shared
    assert file_system.journal_mode(tmp_path / "ledger.sqlite") == ("TRUNCATE" if shared else "WAL")
    assert bool(remarks([tmp_path])) == shared


# New files of other machines


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[Path, bytes]:
    """Files that another machine has made: seen here once the server was asked about their folder."""
    waiting: dict[Path, bytes] = {}

    def synchronise(folder: Path) -> bool:
        for path in [path for path in waiting if path.parent == folder]:
            if not folder.exists():
                return False
            path.write_bytes(waiting.pop(path)) if path.suffix else path.mkdir()
            waiting.pop(path, None)
        return folder.exists()

    monkeypatch.setattr(file_system, "_synchronise", synchronise)
    return waiting


LOOKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "note": ("note.json", read_note),
    "json": ("note.json", read_json),
    "batch": ("step_1.safetensors", lambda path: appears(path) and path.read_bytes()),
    "manifest": ("step_3/manifest.json", lambda path: CheckpointStore(path.parents[1]).exists(3)),
    "object": (
        "committed/step_3.json",
        lambda path: Objects(path.parents[1].as_uri()).get("committed/step_3.json"),
    ),
    "objects": (
        "committed/step_3.json",
        lambda path: Objects(path.parents[1].as_uri()).list("committed"),
    ),
    "listing": ("1.json", lambda path: entries(path.parent, ".json")),
}


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
@pytest.mark.parametrize("what", LOOKS)
def test_whoever_polls_sees_what_another_machine_has_made(
    tmp_path: Path, mount: Mount, server: dict[Path, bytes], what: str, kind: str
):
    """The kernel remembers for up to a minute that a name was not there, unless the server is asked."""
    mount(kind)
    name, look = LOOKS[what]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    server[path] = b"[1]"
    assert bool(look(path)) == (kind == "nfs4")


def test_a_batch_of_another_machine(tmp_path: Path, mount: Mount, server: dict[Path, bytes]):
    mount("nfs4")
    server[tmp_path / "step_1.safetensors"] = b"no batch"
    with pytest.raises(Exception, match="is no batch"):
        read_origin(tmp_path / "step_1.safetensors")


def test_a_file_in_a_folder_that_is_new_as_well(tmp_path: Path, mount: Mount, server: dict[Path, bytes]):
    mount("nfs4")
    server[tmp_path / "step_3"] = b""
    server[tmp_path / "step_3" / "note.json"] = b"[1]"
    assert read_json(tmp_path / "step_3" / "note.json") == [1]


def test_the_server_is_not_asked_at_every_poll(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch):
    mount("nfs4")
    asked = []
    monkeypatch.setattr(file_system, "_synchronise", lambda folder: asked.append(folder) or True)
    monkeypatch.setattr(file_system, "LOOK_SECONDS", 3600)
    assert [look_anew(tmp_path) for _ in range(3)] == [True, False, False]
    monkeypatch.setattr(file_system, "LOOK_SECONDS", 0)
    assert look_anew(tmp_path)
    assert len(asked) == 2


def test_asking_is_a_call_that_this_kernel_has(tmp_path: Path):
    assert file_system._synchronise(tmp_path)
    assert not file_system._synchronise(tmp_path / "missing")


# Locks


@pytest.fixture
def locks_as_on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks files only, and for an exclusive lock they must be open for writing."""
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "a folder")
        if operation & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "not open for writing")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("locks_as_on_nfs")
def test_every_lock_is_one_that_nfs_has(tmp_path: Path, mount: Mount):
    mount("nfs4")
    run = RunDirectory(tmp_path)
    assert run.lock()
    assert run.is_locked()
    run.begin(ATTEMPT)
    run.set_role("trainer", "running")
    roles = run.current_roles()
    assert roles
    assert list(roles) == ["trainer"]
    run.checkpoints.mkdir()
    with CheckpointStore(run.checkpoints).alone():
        pass


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Another process has the run directory's lock; a call of this ends it."""
    holder = RunDirectory(tmp_path)
    assert holder.lock()
    yield holder.unlock
    holder.unlock()


def test_the_lock_of_a_machine_that_is_gone_is_waited_for(
    tmp_path: Path, mount: Mount, held: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    """The file server keeps it until its lease ends."""
    mount("nfs4")
    monkeypatch.setattr(locked_folder, "POLL_SECONDS", 0)
    said: list[str] = []

    def hear(words: str, **_: object) -> None:
        said.append(words)
        held()

    monkeypatch.setattr("builtins.print", hear)
    run = RunDirectory(tmp_path)
    locked_folder.lock(run)
    run.unlock()
    assert len(said) == 1
    assert f"{tmp_path} is locked. On its file system (nfs4, mounted at {tmp_path}) the lock of" in said[0]
    assert "for up to 120 s" in said[0]


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(("kind", "waits"), [("nfs4", True), ("ext4", False)])
def test_a_lock_that_somebody_keeps(
    tmp_path: Path,
    mount: Mount,
    kind: str,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    mount(kind)
    monkeypatch.setattr(locked_folder, "POLL_SECONDS", 0)
    if waits:
        monkeypatch.setattr(locked_folder, "LEASE_SECONDS", 1e-6)
    with pytest.raises(UsageError, match=f"^--output-dir {tmp_path}: another process is running in it$"):
        locked_folder.lock(RunDirectory(tmp_path))
    assert ("waiting for it" in capsys.readouterr().out) == waits


@pytest.mark.parametrize(
    ("kind", "number", "remedy"),
    [
        ("lustre", errno.ENOSYS, "mount it with -o flock"),
        ("nfs", errno.ENOLCK, "rpc.statd"),
        ("beegfs", errno.EOPNOTSUPP, "choose a folder elsewhere"),
    ],
)
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, remedy: str
):
    """Else nothing would keep two launchers apart."""
    mount(kind)

    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match=rf"\.lock: its file system \({kind}, .*{remedy}"):
        RunDirectory(tmp_path).lock()


# SQLite


def journal_mode(path: Path) -> str:
    """As the ledger's file says; a rollback journal is in no file."""
    return "wal" if path.read_bytes()[18] == 2 else "rollback"


def test_the_ledger_needs_no_shared_memory(tmp_path: Path, mount: Mount):
    """Also one that was begun elsewhere, or by an earlier version, goes on."""
    path = tmp_path / "ledger.sqlite"
    mount("ext4")
    ledger = Ledger(path, RUN, None, 0)
    ledger.close()
    assert journal_mode(path) == "wal"
    mount("nfs4")
    ledger = Ledger(path, RUN, None, 0)
    assert not list(path.parent.glob("*_aside_*"))
    assert journal_mode(path) == "rollback"
    assert not Path(f"{path}-shm").exists()
    ledger.close()


KILLED = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA journal_mode = TRUNCATE")
database.execute("PRAGMA cache_size = 1")
database.execute("CREATE TABLE filler (text)")
database.execute("BEGIN")
for _ in range(500):
    database.execute("INSERT INTO filler VALUES (?)", ("x" * 900,))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_ledger_is_read_whose_writer_was_killed_in_a_transaction(tmp_path: Path, mount: Mount):
    """By an audit, which must not write to it; the next writer rolls it back."""
    mount("nfs4")
    path = tmp_path / "ledger.sqlite"
    Ledger(path, RUN, None, 0).close()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert killed.returncode == -signal.SIGKILL
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before["ledger.sqlite-journal"]) > 0
    with open_ledger(path) as database:
        assert database.execute("SELECT count(*) FROM filler").fetchone()[0] == 0
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    ledger = Ledger(path, RUN, None, 0)
    assert not list(path.parent.glob("*_aside_*"))
    ledger.close()


def test_a_journal_goes_where_its_ledger_goes(tmp_path: Path):
    """SQLite would roll a later ledger of the same name back with it."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.begin(ATTEMPT)
    for end in ("", "-journal"):
        Path(f"{run.ledger}{end}").write_bytes(b"x")
    run.set_batches_aside(tmp_path / "aside", Attempt("other", 2, "sft", 0, None, "branch_2"))
    assert {path.name for path in (tmp_path / "aside").iterdir()} == {
        "ledger.sqlite",
        "ledger.sqlite-journal",
    }


# Checkpoints


@pytest.mark.parametrize(("kind", "through"), [("nfs4", True), ("ext4", False)])
def test_parts_of_pages_are_written_through(tmp_path: Path, mount: Mount, kind: str, through: bool):
    """Else a client may send a whole page, with its own idea of the bytes that another machine wrote."""
    mount(kind)
    with direct_file(tmp_path / "shard", 8192) as file:
        assert bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DSYNC) == through
        assert file.direct is None or not fcntl.fcntl(file.direct, fcntl.F_GETFL) & os.O_DSYNC
