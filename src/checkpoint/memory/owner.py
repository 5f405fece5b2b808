"""The process that owns the memory in which the newest steps are kept, so that it outlives ranks and driver.

    python owner.py < SPEC

It makes one file in memory (memfd) for each file of SPEC, which other processes of the user open through
links to `/proc/PID/fd/N`. It ends, and the memory with it, when the launcher has died or it is killed. It
imports neither Cairn nor torch: it takes a few megabytes, and starts at once.
"""

import contextlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

NICENESS = 10


def main() -> None:
    spec = json.load(sys.stdin)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the memory is needed until the run has ended
    ready, done = os.pipe()
    if os.fork():  # Ray kills the children of its workers
        os.close(done)
        sys.exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    os.setsid()
    launcher = os.pidfd_open(spec["launcher"])
    files = _make(Path(spec["folder"]), spec["files"])
    _write_note(Path(spec["folder"]), spec)
    os.write(done, b"1")
    os.close(done)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.nice(NICENESS)
    for fd, size in files:
        with contextlib.suppress(OSError):  # then pages are allocated when they are written
            os.posix_fallocate(fd, 0, max(size, 1))
    died = select.poll()
    died.register(launcher, select.POLLIN)
    died.poll()


def _make(folder: Path, sizes: dict[str, int]) -> list[tuple[int, int]]:
    """Make the files, and a link to each in `folder`; returns descriptors with sizes."""
    found: list[tuple[int, int]] = []
    for name, size in sizes.items():
        fd = os.memfd_create("cairn-step")
        os.ftruncate(fd, size)
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(f"/proc/{os.getpid()}/fd/{fd}", link)
        found.append((fd, size))
    return found


def _write_note(folder: Path, spec: dict[str, Any]) -> None:
    """Say who owns the files, once all are there."""
    note = {"pid": os.getpid(), "began": began(os.getpid()), "layout": spec["layout"]}
    path = folder / "owner.json"
    path.with_suffix(".tmp").write_text(json.dumps(note))
    os.rename(path.with_suffix(".tmp"), path)


def began(pid: int) -> str:
    """When a process began, in ticks since the start of the machine: tells it from a later one of its number.

    Raises:
        OSError: there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


if __name__ == "__main__":
    main()
