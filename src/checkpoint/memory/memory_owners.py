"""The processes that own the memory of a run's newest steps: starting, asking and ending them.

In Ray of one's own there is one, with its links in `memory/`, which ends with the launcher. In a cluster that
was given there is one on each node with ranks, with its links in `memory/NODE/`, which ends with the node, or
when its connection to the one of `memory/launcher/` does: that one ends with the launcher. The run directory,
which all nodes share, says where they listen, and has the token that they want. Imports no torch.
"""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.run.connections import connect, receive, send
from cairn.run.files import read_note
from cairn.run.memory_owner import began
from cairn.run.signals import stop_signals_blocked

NOTE = "owner.json"
LAUNCHER = "launcher"
"""The folder, beside those of nodes, of the owner that ends with the launcher."""
START_SECONDS = 60.0
ASK_SECONDS = 5.0
"""So long a node may take to answer whether its memory is still there."""


@dataclass(frozen=True)
class MemoryOwner:
    """The content of owner.json: which process owns the memory, when it began, and for which files.

    address, port: where it listens, in a cluster. token: the run's; known to the one of the launcher.
    """

    pid: int
    began: str
    layout: str
    address: str = ""
    port: int = 0
    token: str = ""

    @property
    def at(self) -> tuple[str, int]:
        """Where it listens."""
        return self.address, self.port

    @property
    def lives(self) -> bool:
        """Whether the process is on this machine and still there."""
        try:
            return began(self.pid) == self.began
        except OSError:
            return False


@dataclass(frozen=True)
class RankHost:
    """Where a rank runs.

    process: its memory goes when this process of the machine has died: the launcher, or the node's raylet.
    node, address: in a cluster that was given, the node's id, and its address for the other nodes.
    """

    process: int
    node: str = ""
    address: str = ""


@dataclass(frozen=True)
class FoundSlot:
    """A slot of an owner that lives, and the notes in it, by name."""

    owner: MemoryOwner
    name: str
    notes: Mapping[str, str]

    @property
    def letter(self) -> str:
        """The slot's name without that of a peer: all parts of a step are in slots of one letter."""
        return self.name.rpartition("/")[2]


def owner_of(folder: Path) -> MemoryOwner | None:
    """Who owns the memory behind the links in `folder`; None if no process of this machine does."""
    note = read_note(folder / NOTE, MemoryOwner)
    return note if note and note.lives else None


def start_owner(folder: Path, layout: str, process: int, **spec: Any) -> MemoryOwner:
    """Start an owner with its links in `folder`, which is made.

    Args:
        spec: see `cairn.run.memory_owner`.

    Raises:
        OSError, subprocess.SubprocessError: it does not start.
    """
    folder.mkdir(parents=True)
    what: dict[str, Any] = {"slots": (), "files": {}, "notes": (), **spec}
    with stop_signals_blocked():
        subprocess.run(
            [sys.executable, "-m", "cairn.run.memory_owner"],
            input=json.dumps({"folder": str(folder), "layout": layout, "process": process, **what}).encode(),
            check=True,
            timeout=START_SECONDS,
            start_new_session=True,
        )
    owner = owner_of(folder)
    if owner is None:
        raise OSError(f"{folder / NOTE}: the process that owns the memory has ended")
    return owner


def hold(folder: Path, launcher: int, address: str) -> None:
    """Have a process on this machine with which the owners on all nodes end: when `launcher` does.

    Raises:
        OSError, subprocess.SubprocessError: it does not start.
    """
    if owner_of(folder / LAUNCHER) is None:
        free(folder / LAUNCHER)
        start_owner(folder / LAUNCHER, "", launcher, listen=address, token=secrets.token_hex(32))


def holder(folder: Path) -> MemoryOwner:
    """The one that `hold` has started, for the nodes.

    Raises:
        OSError: there is none.
    """
    if found := read_note(folder / LAUNCHER / NOTE, MemoryOwner):
        return found
    raise OSError(f"{folder / LAUNCHER / NOTE} is missing")


def free(folder: Path) -> None:
    """End the processes of this machine that own the memory behind the links in `folder`, and remove them."""
    for owner in filter(None, map(owner_of, (folder, *folder.glob("*/")))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def living_slots(folder: Path, slots: Iterable[str]) -> list[FoundSlot]:
    """The slots of all owners that answer, those first that ranks have written into themselves.

    Args:
        slots: their names, where the owner does not listen.
    """
    if owner := owner_of(folder):
        notes = {slot: folder.joinpath(slot).glob("*.json") for slot in slots}
        return [
            FoundSlot(owner, slot, {path.name: path.read_text(errors="replace") for path in paths})
            for slot, paths in notes.items()
        ]
    try:
        token = holder(folder).token
    except OSError:
        return []
    nodes = [read_note(path, MemoryOwner) for path in folder.glob(f"*/{NOTE}")]
    listening = [owner for owner in nodes if owner and owner.address and owner.layout]

    def ask(owner: MemoryOwner) -> list[FoundSlot]:
        with contextlib.suppress(OSError), connect(owner.at, token, ASK_SECONDS) as link:
            send(link, {"do": "notes"})
            return [FoundSlot(owner, name, notes) for name, notes in receive(link)["slots"].items()]
        return []

    with ThreadPoolExecutor(max(len(listening), 1)) as pool:
        found = list(itertools.chain.from_iterable(pool.map(ask, listening)))
    return sorted(found, key=lambda slot: slot.name != slot.letter)


def copy_to_peer(
    folder: Path, owner: MemoryOwner, peer: MemoryOwner, slot: str, ids: Mapping[str, str]
) -> None:
    """Have `owner` send what is in a slot to `peer`, and return when it is there.

    Args:
        folder: of the run's memory.
        ids: what the receipts must be for, by name; they are waited for.

    Raises:
        OSError: that fails.
    """
    with connect(owner.at, holder(folder).token) as link:
        link.settimeout(None)  # however long it takes: who sends or receives waits for each byte for so long
        send(link, {"do": "copy", "slot": slot, "ids": dict(ids), "peer": peer.at})
        receive(link)
