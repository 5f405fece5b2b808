"""What a process asks of the kernel: to die with another one, and to run where nobody else wants to."""

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ioprio_set, which the C library has no function for, by machine."""
IOPRIO_WHO_PROCESS = 1
IOPRIO_IDLE = 3 << 13


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, the process `parent`, dies (Linux).

    However the parent dies, and even while this process is stopped: what an orphan does later could harm the
    processes that have taken over.
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
        return
    except OSError:  # the system can't
        return

    def watch() -> None:
        select.select([fd], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifetime", daemon=True).start()


def in_background(work: Callable[[], T]) -> T:
    """Do `work` in a thread that Linux schedules at idle priority (SCHED_IDLE).

    The thread is a new one, because a thread can't raise its priority again without privileges. Returns what
    `work` returns and raises what it raises.
    """

    def lower_priority() -> None:
        with contextlib.suppress(AttributeError, OSError):  # then at normal priority
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    with ThreadPoolExecutor(1, "background", initializer=lower_priority) as thread:
        return thread.submit(work).result()


def stay_in_background() -> None:
    """From now on leave processors and disks to all other processes; the threads started later do so too.

    The niceness is the highest, not the idle class: on a machine without an idle moment this process would
    never end its work. Disks serve it when nobody else wants them, where their scheduler knows of that.
    """
    os.nice(19)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(IOPRIO_SET.get(os.uname().machine, -1), IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE)
