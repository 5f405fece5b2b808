"""Taking a run directory for one command at a time."""

import time

from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.file_system import file_system_of
from cairn.run.waiting import Patience

LEASE_SECONDS = 120.0
"""How long a lock may outlive the machine that held it: a file server can't tell that the machine is gone
before its lease ends, with NFS 4 after 90 s by default."""
POLL_SECONDS = 1.0


def lock(run: RunDirectory) -> None:
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
            time.sleep(POLL_SECONDS)
            if run.lock():
                return
    raise UsageError(f"--output-dir {run.path}: another process is running in it")
