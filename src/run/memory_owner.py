"""The process that owns the memory in which the newest steps are kept, so that it outlives ranks and driver.

    python -m cairn.run.memory_owner < SPEC

It makes one file in memory (memfd) for each file of SPEC, in both slots, which other processes of the user
open through links to `/proc/PID/fd/N`. It ends, and the memory with it, when the process that SPEC names has
died or it is killed. It imports no torch: it takes a few megabytes, and starts at once.

On a node of a cluster it also listens. There its files have holes: only what ranks of the node write takes
memory. The owner of another node sends what that node's ranks have written; it goes into files in the slots
`peer/a` and `peer/b`. Whoever connects must know the run's token (`connections.py`). Requests and answers are
messages, and bytes follow some of them:

- notes: the receipts and records in all slots
- read: ranges of files; their bytes follow the answer
- take: ranges of the files of a slot. Their bytes follow, then the notes that say what they are
- copy: once some ranks' receipts are in a slot, send what they have written to the owner at an address
- hold: answered, and then nothing, until one side ends

An owner holds a connection to the one that ends with the launcher, which has no files, and ends with it.
"""

import contextlib
import functools
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cairn.run.connections import PATIENCE_SECONDS, Listener, connect, fill, receive, send
from cairn.run.files import write_json

NICENESS = 10
RECORD = "record.json"
PEER = "peer/"
"""What the slots begin with that are another node's."""
RECEIPT_POLL_SECONDS = 0.01
Spans = dict[str, list[tuple[int, int]]]
"""By file: first byte and number of bytes of ranges."""


def began(pid: int) -> str:
    """When a process began, and on which machine: tells it from any other one of its number.

    Raises:
        OSError: there is no such process.
    """
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"


class OwnedFile:
    """A file in memory."""

    def __init__(self, size: int):
        self.size = size
        self.fd = os.memfd_create("cairn-step")
        os.ftruncate(self.fd, size)

    @functools.cached_property
    def _view(self) -> memoryview:
        return memoryview(mmap.mmap(self.fd, self.size))

    def text(self) -> str:
        """The content of a note; empty while there is none."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode(errors="replace")

    def check(self, first: int, count: int) -> None:
        """Raises ValueError unless the file has this range."""
        if not 0 <= first <= first + count <= self.size:
            raise ValueError(f"bytes {first} to {first + count} of a file of {self.size}")

    def send(self, link: socket.socket, first: int, count: int) -> None:
        """Send a range, straight from this memory."""
        self.check(first, count)
        with open(self.fd, "rb", closefd=False) as file:
            if count and link.sendfile(file, first, count) != count:
                raise ConnectionError("the connection has ended")

    def fill(self, link: socket.socket, spans: list[tuple[int, int]]) -> None:
        """Receive ranges, straight into this memory."""
        for first, count in spans:
            fill(link, self._view[first : first + count])

    def empty(self) -> None:
        """Give the memory of all its bytes back."""
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, self.size)


class OwnedMemory:
    """The files of an owner, as other processes ask for them; one thread a connection."""

    def __init__(self, spec: dict[str, Any]):
        slots, sizes = spec["slots"], spec["files"]
        self.token: str = spec.get("token", "")
        self.notes = {f"{slot}/{name}": OwnedFile(0) for slot in slots for name in spec["notes"]}
        """The small files of the slots."""
        self.files = {f"{slot}/{name}": OwnedFile(size) for slot in slots for name, size in sizes.items()}
        """The tensor files; those of the slots of another node have no links."""
        self.links = {**self.files, **self.notes}
        self._taken: dict[str, dict[str, str]] = {}
        """By slot of the other node: the notes that came with its bytes."""
        self._spans: dict[str, Spans] = {}
        """By slot of the other node: the ranges that came last."""
        if spec.get("listen"):
            for slot in (PEER + slot for slot in slots):
                self.files |= {f"{slot}/{name}": OwnedFile(size) for name, size in sizes.items()}
                self._taken[slot], self._spans[slot] = {}, {}
        self._copying = threading.Lock()
        self._taking = threading.Lock()

    def allocate(self) -> None:
        """Have the kernel allocate all memory now, so that the first copies need not wait for that."""
        for file in self.files.values():
            with contextlib.suppress(OSError):  # then pages are allocated when they are written
                os.posix_fallocate(file.fd, 0, max(file.size, 1))

    def answer(self, link: socket.socket) -> None:
        """Do what is asked for on a connection, until it ends."""
        ways = {"notes": self._notes, "read": self._read, "take": self._take, "copy": self._copy}
        while True:
            link.settimeout(None)
            asked = receive(link)
            if asked.get("do") == "hold":
                send(link, {})
                continue
            link.settimeout(PATIENCE_SECONDS)
            try:
                ways[asked["do"]](link, asked)
            except (OSError, ValueError, KeyError, TypeError) as error:
                send(link, {"error": str(error) or type(error).__name__})
                return

    def _notes(self, link: socket.socket, asked: dict[str, Any]) -> None:
        slots: dict[str, dict[str, str]] = {slot: dict(notes) for slot, notes in self._taken.items()}
        for name, file in self.notes.items():
            slot, _, note = name.partition("/")
            slots.setdefault(slot, {})[note] = file.text()
        send(link, {"slots": slots})

    def _read(self, link: socket.socket, asked: dict[str, Any]) -> None:
        ranges = [(self.files[name], first, count) for name, first, count in asked["ranges"]]
        for file, first, count in ranges:
            file.check(first, count)
        send(link, {})
        for file, first, count in ranges:
            file.send(link, first, count)

    def _take(self, link: socket.socket, asked: dict[str, Any]) -> None:
        slot, spans = PEER + asked["slot"], asked["spans"]
        with self._taking:
            files = {name: self.files[f"{slot}/{name}"] for name in spans}
            for name, file in files.items():
                for first, count in spans[name]:
                    file.check(first, count)
            self._taken[slot] = {}
            if spans != self._spans[slot]:  # ranks are elsewhere now
                for name, file in self.files.items():
                    if name.startswith(f"{slot}/"):
                        file.empty()
            self._spans[slot] = spans
            send(link, {})
            for name, file in files.items():
                file.fill(link, spans[name])
            self._taken[slot] = receive(link)["notes"]
            send(link, {})

    def _copy(self, link: socket.socket, asked: dict[str, Any]) -> None:
        slot: str = asked["slot"]
        with self._copying:
            notes = self._receipts(slot, asked["ids"])
            spans: Spans = {}
            for receipt in map(json.loads, notes.values()):
                for name, ranges in receipt["spans"].items():
                    spans.setdefault(name, []).extend(ranges)
            if "rank0.json" in notes:
                notes[RECORD] = self.notes[f"{slot}/{RECORD}"].text()
            with connect(tuple(asked["peer"]), self.token) as other:
                send(other, {"do": "take", "slot": slot, "spans": spans})
                receive(other)
                for name, ranges in spans.items():
                    for first, count in ranges:
                        self.files[f"{slot}/{name}"].send(other, first, count)
                if any(self.notes[f"{slot}/{name}"].text() != text for name, text in notes.items()):
                    raise OSError("ranks have begun to copy another step")  # the other node has no notes
                send(other, {"notes": notes})
                receive(other)
        send(link, {})

    def _receipts(self, slot: str, ids: dict[str, str]) -> dict[str, str]:
        """The receipts of a slot by name, when all are there that `ids` tells.

        Raises:
            OSError: they don't come.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            texts = {name: self.notes[f"{slot}/{name}"].text() for name in ids}
            missing = [name for name, text in texts.items() if _id_of(text) != ids[name]]
            if not missing:
                return texts
            if time.monotonic() > until:
                raise OSError(f"{missing[0].removesuffix('.json')} has not copied its part")
            time.sleep(RECEIPT_POLL_SECONDS)


def _id_of(receipt: str) -> str | None:
    """What a receipt is for; None if it is not whole."""
    try:
        return json.loads(receipt)["attempt"]
    except (ValueError, KeyError, TypeError):
        return None


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
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ends = [os.pidfd_open(spec["process"])]
    if spec.get("holds"):
        anchor = connect(tuple(spec["holds"]), spec["token"])
        send(anchor, {"do": "hold"})
        receive(anchor)
        ends.append(anchor.fileno())
    served = OwnedMemory(spec)
    _link(Path(spec["folder"]), served.links)
    address = spec.get("listen", "")
    port = Listener(address, served.token, served.answer).port if address else 0
    _write_note(Path(spec["folder"]), spec, address, port)
    os.write(done, b"1")
    os.close(done)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.nice(NICENESS)
    if not address:
        served.allocate()
    died = select.poll()
    for fd in ends:
        died.register(fd, select.POLLIN)
    died.poll()


def _link(folder: Path, files: dict[str, OwnedFile]) -> None:
    """Make a link to each file in `folder`."""
    for name, file in files.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(f"/proc/{os.getpid()}/fd/{file.fd}", link)


def _write_note(folder: Path, spec: dict[str, Any], address: str, port: int) -> None:
    """Say who owns the files, once all are there; only the user may read it, as it may hold the token."""
    note = {"pid": os.getpid(), "began": began(os.getpid()), "layout": spec["layout"]}
    note |= {"address": address, "port": port, "token": "" if spec.get("holds") else spec.get("token", "")}
    write_json(folder / "owner.json", note, private=True)


if __name__ == "__main__":
    main()
