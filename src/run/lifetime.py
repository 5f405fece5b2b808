"""Processes that must not outlive the one that started them."""

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, the process `parent`, dies (Linux).

    However that dies, and even while this process is stopped: what it would do later might harm those who
    have taken over from the dead.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was too late
        os.kill(os.getpid(), signal.SIGKILL)


def die_after(process: int) -> None:
    """Have this process killed as soon as `process`, any other one of this machine, has died (Linux 5.3)."""
    try:
        fd = os.pidfd_open(process)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # the system can't
        return

    def watch() -> None:
        select.select([fd], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifetime", daemon=True).start()
