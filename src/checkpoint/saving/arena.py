"""The arena: memory that a save copies a rank's state into, and the process that writes it to disk.

The memory is shared with the writer process (`cairn.checkpoint.saving.writer`), allocated once, and reused by
every save whose tensors have the same names, data types and shapes. Where the host has too little memory for
the whole state, the arena is a ring: the copy waits until the writer has written what was there before.
"""

# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import ctypes
import json
import logging
import mmap
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.saving.rank_shares import RankShares, Tensors, describe
from cairn.checkpoint.tensors.host_staging import HostCopies, copies_from
from cairn.checkpoint.tensors.layout import ALIGNMENT, plan_rank, ring_pieces
from cairn.checkpoint.tensors.placement import Stored
from cairn.run.signals import stop_signals_blocked

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
LEAST_BYTES = 64 << 20
"""Memory that every arena may have: the writer and the copy work on pieces of up to 16 MiB at a time."""


class SaveFailed(CheckpointError):
    """A save failed; its step was not committed, and no other step was changed."""


class WriterDied(SaveFailed):
    """The writer process was killed or crashed; a restart of the trainer may well succeed."""


class Arena:
    """Shared memory for a copy of this rank's state, and the process that writes it to disk."""

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        max_file_bytes: int,
        room: Callable[[int], int] = lambda nbytes: nbytes,
        copies: Callable[[Iterable[torch.device]], HostCopies] = copies_from,
        packed: Collection[str] = (),
        constant: Mapping[str, Collection[str]] = MappingProxyType({}),
    ):
        """Allocate it.

        Args:
            packed: the folders within the step whose tensor files are packed.
            constant: tensors that are saved without it (`checkpoint.constant`), by stem.
            room: how many bytes of memory it may have, given how many the state takes.
            copies: makes what copies tensors that are on given devices.
        """
        self.rank = rank
        self.broken = False
        """Set after a failed save: the writer's state is unknown, so the next save creates a new arena."""
        self.shares = RankShares(tensors, rank, max_file_bytes, constant)
        self.indices = self.shares.indices
        files, held = self.shares.files, self.shares.ranges
        widths = {
            number: _width(tensors[stem][name] for stem, _, name in map(_parts, file.offsets))
            for number, file in enumerate(files)
            if file.name.rpartition("/")[0] in packed
        }
        self.plan = plan_rank(files, held, with_headers=rank == 0)
        self._copies = [(key, _join(held[key], self.plan.starts[key])) for key in held]
        wanted = self.plan.arena_bytes
        allowed = max(room(wanted), LEAST_BYTES) // ALIGNMENT * ALIGNMENT
        nbytes = min(wanted, allowed)
        self.is_ring = nbytes < wanted
        """Whether the state takes more memory than there is, and so goes through it in pieces."""
        fd = os.memfd_create("cairn-arena")
        os.ftruncate(fd, nbytes)
        with stop_signals_blocked():
            self._writer = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cairn.checkpoint.saving.writer",
                    str(fd),
                    str(nbytes),
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[fd],
            )
        assert self._writer.stdin is not None
        assert self._writer.stdout is not None
        self._commands, self._answers = self._writer.stdin, self._writer.stdout
        self._map = mmap.mmap(fd, nbytes)
        os.close(fd)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._send(
            {
                "files": [[file.name, file.size] for file in files],
                "extents": [[e.file, e.offset, e.nbytes, e.arena] for e in self.plan.extents],
                "report": self.is_ring,
                "rank": rank,
                "packed": widths,
            }
        )
        self._copier = copies(tensor.device for named in tensors.values() for tensor in named.values())
        self._sources: list[tuple[int, torch.Tensor]] = []
        self._headers = [
            (position, torch.frombuffer(bytearray(files[number].header), dtype=torch.uint8))
            for position, number in self.plan.headers
        ]
        self._copied = self._written = 0
        self._ready = threading.Thread(target=self._populate, daemon=True)
        self._ready.start()

    def _populate(self) -> None:
        """Have the kernel allocate the pages now (ctypes releases the GIL); pin them for GPU copies."""
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(len(self._map)), MADV_POPULATE_WRITE
        )
        self._copier.pin(self._bytes)

    def fits(self, tensors: Tensors) -> bool:
        """Whether the arena was made for tensors of these names, data types and shapes."""
        return self.shares.layout == describe(tensors)

    def start_copy(self, tensors: Tensors) -> None:
        """Remember which values to copy; on a GPU the copies run after the work queued there so far."""
        values = self.shares.take(tensors)
        for key, places in self._copies:
            source = values[key]
            if len(places) == 1:
                self._sources.append((places[0][0], source))
            else:
                self._sources += [(start, source[begin:end]) for start, begin, end in places]
        self._sources = sorted([*self._headers, *self._sources], key=lambda source: source[0])
        self._copier.follow()  # also the copies that have made strided values contiguous

    def begin(self, folder: Path, receipt: Path, attempt: str, read_back: bool) -> None:
        """Tell the writer that a save begins."""
        self._ready.join()
        self._send({"save": str(folder), "receipt": str(receipt), "attempt": attempt, "read_back": read_back})

    def copy(self) -> None:
        """Copy all values in the order in which they are written, and report progress to the writer.

        Raises:
            SaveFailed, WriterDied: of a ring, whose space the writer frees: as `end`.
        """
        self._copied = self._written = 0
        step = self._copier.piece_bytes
        if self.is_ring:
            step = min(step, len(self._map) // 4)
        with self._copier.running():
            for start, source in self._sources:
                for begin in range(0, len(source), step):
                    self._copy_piece(start + begin, source[begin : begin + step], step)
        self._tell(self.plan.arena_bytes)
        # Not before the copies are done: the memory of contiguous copies goes to whoever asks for some next.
        self._sources.clear()

    def _copy_piece(self, position: int, piece: torch.Tensor, step: int) -> None:
        """Copy a piece to an arena position, once that is free; tell the writer every `step` bytes."""
        end = position + len(piece)
        if end - self._written > len(self._map):
            self._tell(position)
            while end - self._written > len(self._map):
                self._written = self._answer()["written"]
        for done, first, count in ring_pieces(position, len(piece), len(self._map)):
            self._bytes[first : first + count].copy_(piece[done : done + count], non_blocking=True)
        if end - self._copied >= step:
            self._tell(end)

    def _tell(self, position: int) -> None:
        self._copier.wait()
        self._send({"copied": position})
        self._copied = position

    def end(self) -> None:
        """Wait until the writer is done.

        Raises:
            SaveFailed: writing failed.
            WriterDied: the writer died.
        """
        while "done" not in self._answer():
            pass

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise WriterDied(f"the writer died (exit code {self._writer.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise SaveFailed(answer["error"])
        return answer

    def kill_writer(self) -> None:
        """Kill the writer; threads that wait for it get WriterDied."""
        self._writer.kill()

    def close(self) -> None:
        """End the writer."""
        self._ready.join()
        self._copier.unpin(self._bytes)
        with contextlib.suppress(BrokenPipeError):  # it has died already
            self._commands.close()
        self._writer.wait()
        self._answers.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._commands.write((json.dumps(message) + "\n").encode())
            self._commands.flush()
        except BrokenPipeError:
            raise WriterDied(f"the writer died (exit code {self._writer.wait()})") from None


def _parts(key: str) -> tuple[str, str, str]:
    """The stem and the name in a tensor's name within a step, with what is between them."""
    return key.partition(":")


def _width(tensors: Iterable[Stored]) -> int:
    """The size of most values of a file, by bytes."""
    nbytes: Counter[int] = Counter()
    for tensor in tensors:
        nbytes[tensor.element_size()] += tensor.numel() * tensor.element_size()
    return nbytes.most_common(1)[0][0]


def _join(ranges: list[tuple[int, int]], starts: list[int]) -> list[tuple[int, int, int]]:
    """The copies that fill a tensor's ranges: (arena position, first local byte, number of bytes).

    Ranges that are adjacent in the arena, as short ones are, become one copy.
    """
    joined: list[tuple[int, int, int]] = []
    position = 0
    for (_, nbytes), start in zip(ranges, starts, strict=True):
        end = position + nbytes
        if joined and joined[-1][0] + position - joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1], end)
        else:
            joined.append((start, position, end))
        position = end
    return joined
