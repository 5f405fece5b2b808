"""Prints, as JSON, what a process sees of itself: `python -m process_facts ARGUMENT...`; exits with 7."""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
PR_GET_PDEATHSIG = 2


def facts() -> dict[str, object]:
    dies_by = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(dies_by))
    listed = os.open("/proc/self/fd", os.O_RDONLY)
    files = [int(name) for name in os.listdir(listed) if int(name) != listed]
    return {
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "dies with its parent": dies_by.value,
        "folder": os.getcwd(),
        "arguments": sys.argv,
        "first of the path": sys.path[0],
        "name": __name__,
        "environment": dict(os.environ),
        "files": sorted(files),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "handlers": {number.name: str(signal.getsignal(number)) for number in STOPS},
        "input": sys.stdin.read(),
        "umask": os.umask(0o22),
        "command line": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
    }


if __name__ == "__main__":
    print(json.dumps(facts(), default=int))
    print("an error", file=sys.stderr)
    sys.exit(7)
