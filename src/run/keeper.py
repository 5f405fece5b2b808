"""Run a command that must leave nothing behind, whoever dies first.

    python keeper.py FD ON_TERM COMMAND ARG...

When the command ends, or the pipe of descriptor FD closes (its owner is gone, however it died), every process
that descends from the command is killed, also those in sessions of their own. Ends as the command did. The
command has this process's standard input, unless that is FD. ON_TERM says what becomes of SIGTERM: `kill`
kills everything, `pass` leaves the end to the command, which gets the signal.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 127
"""The exit code where there is no such command, as shells have it."""

_libc = ctypes.CDLL(None)


def main() -> None:
    # Its owner may die while it is stopped: then it goes on, finds the pipe closed, and ends what there is.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner is asked as well, and decides
    pipe, on_term, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    try:
        kept = subprocess.Popen(
            command,
            stdin=None if pipe else subprocess.DEVNULL,
            preexec_fn=functools.partial(_die_with, os.getpid()),
        )
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)

    def pass_on(*_: object) -> None:
        kept.terminate()

    signal.signal(signal.SIGTERM, pass_on if on_term == "pass" else _killed)
    threading.Thread(target=_end_with_owner, args=[pipe], daemon=True).start()
    _end(kept.wait())


def _die_with(keeper: int) -> None:
    """In the new process, before it is the command."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it was too late
        os.kill(os.getpid(), signal.SIGKILL)


def _killed(*_: object) -> None:
    _end(-signal.SIGKILL)


def _end_with_owner(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    _end(-signal.SIGKILL)


def _end(code: int) -> None:
    """Kill what is left, and end as a process with this exit code; negative: that of a signal."""
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


def _children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


if __name__ == "__main__":
    main()
