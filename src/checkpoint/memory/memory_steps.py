"""The newest steps in the host's memory, outside the ranks, from which ranks that have died go on.

Two slots take turns, so that one of them is whole at any moment. In a slot are the tensor files of a step, as
a checkpoint has them, in memory that another process owns (`owner.py`). All ranks of the host write their
ranges into them: one copy of the state, while the next step's forward and backward passes run. A rank's
receipt, written last, says for which step its bytes are, and has their checksums.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.checksums import FileChecksum, make_receipt
from cairn.checkpoint.memory.memory_slots import (
    FIXED,
    RECORD,
    SLOTS,
    MemoryRecord,
    free,
    owner_of,
    receipt_id,
    receipt_name,
    record_in,
)
from cairn.checkpoint.saving.rank_shares import RankShares, Tensors, describe
from cairn.checkpoint.saving.saver import SavingRank
from cairn.checkpoint.tensors.host_staging import HostCopies, Outlet, copies_from
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES
from cairn.checkpoint.tensors.reader import as_memory
from cairn.run.faults import fault_point
from cairn.run.files import write_atomic
from cairn.run.signals import stop_signals_blocked

logger = logging.getLogger(__name__)

OWNER = Path(__file__).with_name("owner.py")
PIECE_BYTES = 512 << 10
"""What is copied and then checksummed, while it is in the processor's cache."""
START_SECONDS = 60.0


class MemorySteps:
    """Keeps one rank's part of the newest steps in memory.

    All ranks call `prepare` and `keep` for the same steps, `before_update` right before every update of the
    weights, and `close` or `abandon` at the end.

    Args:
        folder: where the links to the memory are; it is this class's own.
        launcher: the process with which the memory goes; None if it is not on this machine.
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
        launcher: int | None,
        gather: Callable[[Any], list[Any]],
        room: Callable[[], int],
        files: Mapping[str, bytes],
        start: int,
        copies: Callable[..., HostCopies] = copies_from,
    ):
        self.folder, self.rank = folder, rank
        self.seconds = 0.0
        """How long the newest copy took."""
        self._launcher, self._gather, self._room = launcher, gather, room
        self._fixed, self._start = files, start
        self._copies_of = copies
        self._shares: RankShares | None = None
        self._outlet: Outlet | None = None
        self._notes: dict[str, dict[str, int]] = {}
        """By slot and name: descriptors of the small files that this rank writes."""
        self._maps: dict[str, dict[str, torch.Tensor]] = {}
        """By slot and name: the tensor files, uint8 [bytes], that this rank writes into."""
        self._slot = 0
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
        copies = self._copies_of(tensor.device for named in tensors.values() for tensor in named.values())
        self._outlet = Outlet(copies)
        hosts = set(self._gather(socket.gethostname()))
        problem, first = "", 0
        if self.rank.rank == 0:
            try:
                problem = self._why_not(hosts) or ""
                first = 0 if problem else self._find_or_start()
                for name, data in {} if problem else {**self._fixed, **shares.indices}.items():
                    place = self.folder / FIXED / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(place, data)
            except (OSError, subprocess.SubprocessError) as error:
                problem = str(error)
        problem, self._slot = self._gather((problem, first))[0]
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
        self._given_up = bool(problem)

    def keep(self, step: int, tensors: Tensors, record: MemoryRecord | None) -> None:
        """Begin to copy `step`; the tensors must not change until `before_update` has returned.

        Args:
            record: of the step; on rank 0.
        """
        self.wait()
        self.prepare(tensors)
        assert self._shares is not None
        assert self._outlet is not None
        values = self._shares.take(tensors)
        if self._given_up:
            return
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
        self._gather(None)
        if self.rank.rank == 0 and self._shares is not None:
            free(self.folder)

    def _why_not(self, hosts: set[str]) -> str | None:
        """Why no step can be kept in memory here, if so."""
        assert self._shares is not None
        if len(hosts) > 1:
            return f"ranks are on {len(hosts)} machines, and it is only for those of one"
        if self._launcher is None:
            return "the ranks are not on the machine on which the run was started"
        wanted, room = len(SLOTS) * sum(file.size for file in self._shares.files), self._room()
        if wanted > room:
            return (
                f"two copies of the state take {wanted / 1e9:.1f} GB, and there is room for {room / 1e9:.1f}"
            )
        return None

    def _find_or_start(self) -> int:
        """Have a process own memory for the files, a living one if it has the same; returns the next slot."""
        assert self._shares is not None
        files = {file.name: file.size for file in self._shares.files}
        notes = {name: 0 for name in [RECORD, *map(receipt_name, range(self.rank.world_size))]}
        headers = [file.header.decode(errors="replace") for file in self._shares.files]
        layout = hashlib.sha256(json.dumps([files, notes, headers]).encode()).hexdigest()
        if (owner := owner_of(self.folder)) and owner.layout == layout:
            records = {slot: record_in(self.folder / slot) for slot in SLOTS}
            here = [slot for slot, found in records.items() if found and found.step == self._start]
            return 1 - SLOTS.index(here[0]) if here else 0
        free(self.folder)
        self.folder.mkdir(parents=True)
        names = {f"{slot}/{name}": size for slot in SLOTS for name, size in {**files, **notes}.items()}
        spec = {
            "folder": str(self.folder),
            "files": names,
            "layout": layout,
            "launcher": self._launcher,
        }
        with stop_signals_blocked():
            subprocess.run(
                [sys.executable, "-I", "-S", str(OWNER)],
                input=json.dumps(spec).encode(),
                check=True,
                timeout=START_SECONDS,
                start_new_session=True,
            )
        return 0

    def _open(self) -> None:
        """Open those files of both slots that this rank writes into."""
        assert self._shares is not None
        shares, first = self._shares, self.rank.rank == 0
        small = [receipt_name(self.rank.rank), *([RECORD] if first else [])]
        ours = [one for one in shares.files if first or not shares.ranges.keys().isdisjoint(one.offsets)]
        for slot in SLOTS:
            where = self.folder / slot
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
            receipt = make_receipt(receipt_id(self.rank.session, step), checksums)
            os.pwrite(notes[own], json.dumps(receipt).encode(), 0)
            self.seconds = time.monotonic() - started
            fault_point("memory.sealed")
        except Exception as error:
            logger.warning("step %d is not kept in memory: %s", step, error)

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
