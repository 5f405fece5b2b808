"""Processes that must not outlive the one that started them."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, the process `parent`, dies (Linux).

    However that dies, and even while this process is stopped: what it would do later might harm those who
    have taken over from the dead.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was too late
        os.kill(os.getpid(), signal.SIGKILL)
