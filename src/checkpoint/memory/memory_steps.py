"""The newest steps in hosts' memory, outside the ranks, from which ranks that have died go on.

Two slots take turns, so that one of them is whole at any moment. In a slot are the tensor files of a step, as
a checkpoint has them, in memory that another process owns (`cairn.run.memory_owner`). All ranks of the host
write their ranges into them: one copy of the state, while the next step's forward and backward passes run. A
rank's receipt, written last, says for which step its bytes are, and has their checksums.

In a cluster that was given, each node has such a process, and keeps the ranges of its own ranks. The nodes
form a ring, in which each one's part of a step goes to the next one's memory as soon as it is whole. All
parts of a step, and their copies, are in slots of one letter. No step is taken while parts of the one before
are on their way: it would take the place of the step before that, the only one that survives a node then.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import hashlib
import json
import logging
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.checksums import FileChecksum, make_receipt
from cairn.checkpoint.memory.memory_owners import (
    MemoryOwner,
    RankHost,
    copy_to_peer,
    free,
    holder,
    owner_of,
    start_owner,
)
from cairn.checkpoint.memory.memory_slots import (
    FIXED,
    SLOTS,
    MemoryRecord,
    receipt_id,
    receipt_name,
    record_of,
)
from cairn.checkpoint.saving.rank_shares import RankShares, Tensors, describe
from cairn.checkpoint.saving.saver import SavingRank
from cairn.checkpoint.tensors.host_staging import HostCopies, Outlet, copies_from
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES
from cairn.checkpoint.tensors.reader import as_memory
from cairn.run.faults import fault_point
from cairn.run.files import write_atomic
from cairn.run.memory_owner import RECORD, Spans

logger = logging.getLogger(__name__)

PIECE_BYTES = 512 << 10
"""What is copied and then checksummed, while it is in the processor's cache."""


@dataclass(frozen=True)
class _Seat:
    """Where a rank runs, and how many bytes of a step it has."""

    node: str
    nbytes: int


class MemorySteps:
    """Keeps one rank's part of the newest steps in memory.

    All ranks call `prepare` and `keep` for the same steps, `before_update` right before every update of the
    weights, and `close` or `abandon` at the end.

    Args:
        folder: where the links to the memory are; it is this class's own.
        host: where the rank runs.
        gather: returns, on every rank, the list of what all ranks passed to it.
        room: how many bytes of memory all ranks of the host may take for it.
        files: small files that all steps have alike, by name within the step; known to rank 0.
        start: the step that the ranks have gone on from.
        copies: makes what copies tensors that are on given devices.
    """

    def __init__(
        self,
        folder: Path,
        rank: SavingRank,
        host: RankHost,
        gather: Callable[[Any], list[Any]],
        room: Callable[[], int],
        files: Mapping[str, bytes],
        start: int,
        copies: Callable[..., HostCopies] = copies_from,
    ):
        self.folder, self.rank = folder, rank
        self._seconds = self._peer_seconds = 0.0
        self._host, self._gather, self._room = host, gather, room
        self._home = folder / host.node
        """Where the links to this node's memory are."""
        self._spans: dict[str, Any] = {}
        """What a receipt says of where this rank's bytes are, for owners that listen."""
        self._seats: list[_Seat] = []
        self._owner: MemoryOwner | None = None
        """Known to the first rank of each node."""
        self._peer: MemoryOwner | None = None
        """The owner on the next node, if there are several; known to the first rank of each node."""
        self._sender: threading.Thread | None = None
        self._alone = False
        """Whether a copy to the next node has failed."""
        self._fixed, self._start = files, start
        self._copies_of = copies
        self._shares: RankShares | None = None
        self._outlet: Outlet | None = None
        self._notes: dict[str, dict[str, int]] = {}
        """By slot and name: descriptors of the small files that this rank writes."""
        self._maps: dict[str, dict[str, torch.Tensor]] = {}
        """By slot and name: the tensor files, uint8 [bytes], that this rank writes into."""
        self._slot = 0
        self._inherited: set[str] = set()
        """The slots that this has not written into yet."""
        self._given_up = False
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Find or make the memory for tensors like these, unless that was done.

        An optimiser's state may come later than the first step: then there is other memory from then on.
        """
        if self._shares is not None and self._shares.layout == describe(tensors):
            return
        self.abandon()
        self._shares = shares = RankShares(tensors, self.rank.rank, MAX_FILE_BYTES)
        self._spans = {"spans": _spans_of(shares)} if self._host.address else {}
        copies = self._copies_of(tensor.device for named in tensors.values() for tensor in named.values())
        self._outlet = Outlet(copies)
        nbytes = sum(count for ranges in shares.ranges.values() for _, count in ranges)
        self._seats = self._gather(_Seat(self._host.node, nbytes))
        problem, owner = "", None
        if self._is_first:
            try:
                owner = self._find_or_start()
                for name, data in {**self._fixed, **shares.indices}.items() if self.rank.rank == 0 else ():
                    place = self.folder / FIXED / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(place, data)
            except (OSError, subprocess.SubprocessError) as error:
                problem = f"{self._host.address}: {error}" if self._host.address else str(error)
        resumed = record_of(self.folder / f"step_{self._start}")
        first = 1 - SLOTS.index(resumed.slot) if resumed else 0
        found = self._gather((problem, owner, first))
        problem, self._slot = next(filter(None, (one[0] for one in found)), ""), found[0][2]
        self._owner, self._peer = owner, self._next_of([one[1] for one in found])
        if not problem:
            try:
                self._open()
            except OSError as error:
                problem = f"{error.filename}: {error.strerror}"
        problem = next(filter(None, self._gather(problem)), "")
        if problem:
            self._close_files()
            if self.rank.rank == 0:
                logger.warning("no step is kept in memory (ckpt.memory_interval): %s", problem)
        self._given_up, self._inherited = bool(problem), set(SLOTS)

    def keep(self, step: int, tensors: Tensors, record: MemoryRecord | None) -> None:
        """Begin to copy `step`, unless parts of the one before are still on their way to other nodes; the
        tensors must not change until `before_update` has returned.

        Args:
            record: of the step; on rank 0.
        """
        self.wait()
        self.prepare(tensors)
        assert self._shares is not None
        assert self._outlet is not None
        if self._given_up or not self._may_take():
            return
        values = self._shares.take(tensors)
        self._outlet.follow()
        slot, self._slot = SLOTS[self._slot], 1 - self._slot
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._run, args=(slot, step, values, record), name="memory step", daemon=True
        )
        self._thread.start()

    def before_update(self) -> float:
        """Wait until the state has been copied; returns the seconds that took."""
        started = time.monotonic()
        self._copied.wait()
        return time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """How long it took until the newest step was whole here, and until another node had it, too."""
        found = {"time/memory": self._seconds, "time/memory_peer": self._peer_seconds}
        return {name: seconds for name, seconds in found.items() if seconds}

    def wait(self) -> None:
        """Wait until the newest step is kept."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """End, and leave the memory to those who go on."""
        self.wait()
        self._close_files()
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def close(self) -> None:
        """End, and free the memory: nobody will go on from it. All ranks call it."""
        self.abandon()
        self._alone = True  # who is told that it goes has nothing to say
        self._gather(None)
        if self._shares is not None and self._is_first:
            free(self._home)

    @property
    def _nodes(self) -> list[str]:
        """The nodes, in the order of their first ranks."""
        return list(dict.fromkeys(seat.node for seat in self._seats))

    @property
    def _neighbours(self) -> list[int]:
        """The ranks of this node."""
        return [rank for rank, seat in enumerate(self._seats) if seat.node == self._host.node]

    @property
    def _is_first(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.rank.rank == self._neighbours[0]

    def _next_of(self, owners: list[MemoryOwner | None]) -> MemoryOwner | None:
        """Of the owners, by rank, that of the node after this one; None if there is no other."""
        nodes = self._nodes
        following = nodes[(nodes.index(self._host.node) + 1) % len(nodes)]
        if following == self._host.node or not self._is_first:
            return None
        return next(o for o, seat in zip(owners, self._seats, strict=True) if seat.node == following)

    def _may_take(self) -> bool:
        """Whether no node is still sending its part of the step before; the same on all ranks.

        If so, the slot's memory is freed first of what ranks have left there that are on other nodes now.
        """
        if len(self._nodes) == 1:
            return True
        slot = self._home / SLOTS[self._slot]
        left = self._left_in(slot) if self._is_first and slot.name in self._inherited else {}
        found = self._gather((self._sender is not None and self._sender.is_alive(), bool(left)))
        if any(sends for sends, _ in found):
            return False
        self._inherited.discard(slot.name)
        if any(leaves for _, leaves in found):
            with contextlib.suppress(OSError):  # whoever owned it has died
                for path, size in left.items():
                    os.truncate(path, 0)
                    os.truncate(path, size)
            self._gather(None)  # no rank writes before
        return True

    def _left_in(self, slot: Path) -> dict[Path, int]:
        """The files of a slot that holds parts of ranks that are on other nodes now, and their sizes."""
        assert self._shares is not None
        others = set(range(self.rank.world_size)).difference(self._neighbours)
        notes = dict[Path, int]()
        with contextlib.suppress(OSError):
            notes = {note: 0 for rank in others if (note := slot / receipt_name(rank)).stat().st_size}
        return {**notes, **{slot / file.name: file.size for file in self._shares.files}} if notes else {}

    def _check_room(self) -> None:
        """Raises OSError if this node has too little memory for what it is to hold."""
        assert self._shares is not None
        nodes = self._nodes
        of = {node: sum(seat.nbytes for seat in self._seats if seat.node == node) for node in nodes}
        headers = sum(len(file.header) for file in self._shares.files)
        held, what = [self._host.node], "two copies of the state"
        if len(nodes) > 1:
            held.append(nodes[nodes.index(self._host.node) - 1])
            what = "two copies of this node's part of the state, and of another node's,"
        wanted, room = len(SLOTS) * sum(of[node] + headers for node in held), self._room()
        if wanted > room:
            raise OSError(f"{what} take {wanted / 1e9:.1f} GB, and there is room for {room / 1e9:.1f}")

    def _find_or_start(self) -> MemoryOwner:
        """Have a process own memory for the files on this node, a living one if it has the same.

        Raises:
            OSError, subprocess.SubprocessError: there is too little memory, or it does not start.
        """
        assert self._shares is not None
        files = {file.name: file.size for file in self._shares.files}
        notes = [RECORD, *map(receipt_name, range(self.rank.world_size))]
        headers = [file.header.decode(errors="replace") for file in self._shares.files]
        layout = hashlib.sha256(json.dumps([files, notes, headers]).encode()).hexdigest()
        if (owner := owner_of(self._home)) and owner.layout == layout:
            return owner
        free(self._home)
        self._check_room()
        listens: dict[str, Any] = {}
        if address := self._host.address:
            held = holder(self.folder)
            listens = {"listen": address, "token": held.token, "holds": held.at}
        what = {"slots": SLOTS, "files": files, "notes": notes, **listens}
        return start_owner(self._home, layout, self._host.process, **what)

    def _open(self) -> None:
        """Open those files of both slots that this rank writes into."""
        assert self._shares is not None
        shares, first = self._shares, self.rank.rank == 0
        small = [receipt_name(self.rank.rank), *([RECORD] if first else [])]
        ours = [one for one in shares.files if first or not shares.ranges.keys().isdisjoint(one.offsets)]
        for slot in SLOTS:
            where = self._home / slot
            self._notes[slot] = {name: os.open(where / name, os.O_RDWR) for name in small}
            self._maps[slot] = {one.name: _mapped(where / one.name) for one in ours if one.size}

    def _close_files(self) -> None:
        for opened in self._notes.values():
            for fd in opened.values():
                os.close(fd)
        self._notes, self._maps = {}, {}

    def _run(
        self, slot: str, step: int, values: Mapping[str, torch.Tensor], record: MemoryRecord | None
    ) -> None:
        """The part that runs in a thread. Training goes on whatever comes of it."""
        try:
            started, notes = time.monotonic(), self._notes[slot]
            own = receipt_name(self.rank.rank)
            try:
                for fd in notes.values():
                    os.ftruncate(fd, 0)
                fault_point("memory.begin")
                checksums = self._copy(self._maps[slot], values)
            finally:
                self._copied.set()
            fault_point("memory.copied")
            if record is not None:
                os.pwrite(notes[RECORD], record.to_json(), 0)
            receipt = {**make_receipt(receipt_id(self.rank.session, step), checksums), **self._spans}
            os.pwrite(notes[own], json.dumps(receipt).encode(), 0)
            self._seconds = time.monotonic() - started
            fault_point("memory.sealed")
            if self._peer is not None:
                self._sender = threading.Thread(
                    target=self._send, args=(slot, step, started), name="memory step to peer", daemon=True
                )
                self._sender.start()
        except Exception as error:
            logger.warning("step %d is not kept in memory: %s", step, error)

    def _send(self, slot: str, step: int, started: float) -> None:
        """Have this node's part of a step sent to the next node; runs in a thread."""
        assert self._owner is not None
        assert self._peer is not None
        ids = {receipt_name(rank): receipt_id(self.rank.session, step) for rank in self._neighbours}
        try:
            fault_point("peer.sending")
            copy_to_peer(self.folder, self._owner, self._peer, slot, ids)
            self._peer_seconds, self._alone = time.monotonic() - started, False
            fault_point("peer.sent")
        except OSError as error:
            if not self._alone:
                logger.warning("step %d is not in the memory of another node: %s", step, error)
            self._alone = True

    def _copy(
        self, files: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> dict[str, FileChecksum]:
        """Copy this rank's bytes to where they belong; returns their checksums, by file."""
        assert self._shares is not None
        assert self._outlet is not None
        outlet, checksums = self._outlet, dict[str, FileChecksum]()
        with torch.no_grad(), outlet.running():
            for file in self._shares.files:
                if file.name not in files:
                    continue
                target, checksum = files[file.name], FileChecksum(file.size)
                checksums[file.name] = checksum
                if self.rank.rank == 0:
                    _put(target, 0, torch.frombuffer(bytearray(file.header), dtype=torch.uint8), checksum)
                for key, start in file.offsets.items():
                    taken = 0
                    for first, nbytes in self._shares.ranges.get(key, ()):
                        for done in range(0, nbytes, outlet.piece_bytes):
                            begin, end = taken + done, taken + min(done + outlet.piece_bytes, nbytes)
                            _put(target, start + first + done, outlet.bring(values[key][begin:end]), checksum)
                        taken += nbytes
        return checksums


def _spans_of(shares: RankShares) -> Spans:
    """The ranges of each file that a rank writes; ranges that touch are one."""
    found: Spans = {}
    for file in shares.files:
        ranges = [
            (start + at, n) for key, start in file.offsets.items() for at, n in shares.ranges.get(key, ())
        ]
        if shares.rank == 0:
            ranges.append((0, len(file.header)))
        spans: list[tuple[int, int]] = []
        for first, count in sorted(one for one in ranges if one[1]):
            if spans and sum(spans[-1]) == first:
                first, count = spans[-1][0], spans.pop()[1] + count
            spans.append((first, count))
        if spans:
            found[file.name] = spans
    return found


def _put(target: torch.Tensor, offset: int, data: torch.Tensor, checksum: FileChecksum) -> None:
    """Copy bytes to an offset of a file in memory; what is there then is checksummed."""
    for begin in range(0, len(data), PIECE_BYTES):
        piece = data[begin : begin + PIECE_BYTES]
        there = target[offset + begin : offset + begin + len(piece)]
        there.copy_(piece)
        checksum.add(offset + begin, as_memory(there))


def _mapped(path: Path) -> torch.Tensor:
    """A file in memory, uint8 [bytes]; the mapping goes with the tensor."""
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
