"""Saving while training goes on.

Parameters and optimiser state change only inside `optimizer.step()`. So a save copies them in a thread while
the next forward and backward run, into an arena of shared memory that is allocated once; a process of its own
(`cairn.checkpoint.writer`) writes the arena out and makes it durable; and rank 0 commits the step when every
rank's part, and every other role's, has arrived. The loop waits only where the copy is not done when the next
update comes, or where a save falls due while the one before is still under way.
"""

import contextlib
import ctypes
import json
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.layout import MAX_FILE_BYTES, FileLayout, plan_rank
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.reader import as_bytes
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import Stored, local_part, local_values, plan_tensors
from cairn.run.faults import fault_point
from cairn.run.signals import stop_signals_blocked

logger = logging.getLogger(__name__)

COPY_BYTES = 8 << 20  # the writer is told of the copy's progress this often
MADV_POPULATE_WRITE = 23

Tensors = Mapping[str, Mapping[str, Stored]]
"""Tensors by file stem within the step, such as `model/model`, and by name."""


@dataclass(frozen=True)
class Saved:
    """A save that is over. Seconds: the training loop stood still; until it was durable and committed."""

    step: int
    stall_seconds: float
    durable_seconds: float


class SaveFailed(CheckpointError):
    """A save failed; no step was committed for it and none was harmed."""


class WriterDied(SaveFailed):
    """The process that writes was killed or crashed; another start of the trainer may well succeed."""


class Saver:
    """Saves one rank's part of checkpoints; rank 0 also commits them.

    All ranks call `save` for the same steps. `before_update` goes right before every `optimizer.step()`,
    `check` once a step, `finish` at the end.

    Args:
        session: names this start of all ranks; what an earlier one left behind is not taken for theirs.
        roles: other roles whose parts belong to a checkpoint, such as orchestrator, and the id they carry.
        part_timeout: seconds to wait for another rank's or role's part.
        read_back: read what was written again from the disk, and compare, before it counts.
        before_commit: called by rank 0 in the background when all but the manifest is durable.
        after_commit: called by rank 0 in the background after each commit, as for retention.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        rank: int,
        world_size: int,
        session: str,
        roles: Mapping[str, str] | None = None,
        part_timeout: float = 300.0,
        read_back: bool = False,
        max_file_bytes: int = MAX_FILE_BYTES,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[int], None] = lambda step: None,
    ):
        self.store = store
        self.rank = rank
        self.session = session
        self.parts = {
            "files": session,
            **{f"trainer{r}": session for r in range(world_size)},
            **(roles or {}),
        }
        self.part_timeout = part_timeout
        self.read_back = read_back
        self.max_file_bytes = max_file_bytes
        self.before_commit = before_commit
        self.after_commit = after_commit
        self._arena: _Arena | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stall = 0.0
        self._done: list[Saved] = []
        self._given_up = threading.Event()

    def prepare(self, tensors: Tensors) -> None:
        """Allocate the arena for state of this shape, in the background; else `save` does it."""
        if self._arena is None or self._arena.broken or not self._arena.fits(tensors):
            self.finish()
            self.close()
            self._arena = _Arena(tensors, self.rank, self.max_file_bytes)

    def save(self, step: int, tensors: Tensors, files: Mapping[str, bytes], about: dict[str, Any]) -> None:
        """Begin to save `step`; the tensors must not change until `before_update` has returned.

        A save that is still under way is waited for first.

        Args:
            files: small files of rank 0, by name within the step.
            about: the manifest's fields that describe the run (see `CheckpointStore.commit`).

        Raises:
            SaveFailed: the save before this one failed.
        """
        started = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            logger.warning("step %d waits for the save before it, which is still being written", step)
        self.finish()
        self.prepare(tensors)
        assert self._arena is not None
        self._arena.start_copy(tensors)
        self._copied.clear()
        folders = sorted({name.rpartition("/")[0] for name in [*tensors, *files]})
        self._thread = threading.Thread(
            target=self._run,
            args=(step, self._arena, folders, dict(files), about, started),
            name="save",
            daemon=True,
        )
        self._thread.start()
        self._stall = time.monotonic() - started

    def before_update(self) -> None:
        """Wait until the state has been copied; call it right before it changes."""
        if not self._copied.is_set():
            started = time.monotonic()
            self._copied.wait()
            self._stall += time.monotonic() - started

    def check(self) -> list[Saved]:
        """The saves that were completed since the last call.

        Raises:
            SaveFailed: one failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            kind = WriterDied if isinstance(error, WriterDied) else SaveFailed
            raise kind(f"saving failed: {error}") from error
        done, self._done = self._done, []
        return done

    def finish(self) -> None:
        """Wait for the save under way.

        Raises:
            SaveFailed: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            done = self.check()
            self._done = done

    def close(self) -> None:
        """End the writer and give the arena back."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def abandon(self) -> None:
        """Give up the save under way, if there is one, and close.

        When this returns nothing writes into its folder any more, so that other ranks may save the same step.
        """
        self._given_up.set()
        if self._arena is not None:
            self._arena.kill_writer()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.close()

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise SaveFailed("the save was given up")

    def _run(
        self,
        step: int,
        arena: "_Arena",
        folders: list[str],
        files: dict[str, bytes],
        about: dict[str, Any],
        started: float,
    ) -> None:
        """The background half of a save."""
        try:
            part_file = self.store.part_file(step, f"trainer{self.rank}")
            try:
                if self.rank == 0:
                    fault_point("save.begin")
                    self.store.begin(step, folders, self.session)
                self.store.wait_for_begin(
                    step, self.session, timeout=self.part_timeout, on_poll=self._check_wanted
                )
                arena.begin(self.store.folder(step), part_file, self.session, self.read_back)
                fault_point("save.copy")
                arena.copy()
            finally:
                self._copied.set()
            if self.rank == 0:
                small = {**files, **arena.indices}
                self.store.write_part(step, "files", small, self.session, read_back=self.read_back)
            arena.end()
            if self.rank == 0:
                self.before_commit()
                self.store.commit(
                    step,
                    self.parts,
                    timeout=self.part_timeout,
                    about=about,
                    read_back=self.read_back,
                    on_poll=self._check_wanted,
                )
            self._done.append(Saved(step, self._stall, time.monotonic() - started))
            if self.rank == 0:
                self.after_commit(step)
        except BaseException as error:
            arena.broken = True
            self._error = error


class _Arena:
    """Shared memory that holds a copy of this rank's state, and the process that writes it out."""

    def __init__(self, tensors: Tensors, rank: int, max_file_bytes: int):
        self.rank = rank
        self.broken = False
        """After a failed save nobody knows what the writer waits for: the next save gets a new one."""
        self.layout = _describe(tensors)
        files: list[FileLayout] = []
        self.indices: dict[str, bytes] = {}
        held: dict[str, tuple[int, int]] = {}
        self._keys: list[tuple[str, str]] = []
        for stem, named in tensors.items():
            own, index = plan_tensors(named, stem.rpartition("/")[2], max_file_bytes)
            prefix = stem.rpartition("/")[0]
            files += [_inside(file, prefix, stem) for file in own]
            if index is not None:
                self.indices[f"{stem}.safetensors.index.json"] = index
            for name, tensor in named.items():
                part = local_part(tensor, rank)
                if part is not None:
                    held[f"{stem}:{name}"] = (part[1], part[0].nbytes)
                    self._keys.append((stem, name))
        self.plan = plan_rank(files, held, with_headers=rank == 0)
        nbytes = self.plan.arena_bytes
        fd = os.memfd_create("cairn-arena")
        os.ftruncate(fd, nbytes)
        with stop_signals_blocked():
            self._writer = subprocess.Popen(
                [sys.executable, "-m", "cairn.checkpoint.writer", *map(str, (fd, nbytes, os.getpid()))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[fd],
            )
        self._map = mmap.mmap(fd, nbytes)
        os.close(fd)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._send(
            {
                "files": [[file.name, file.size] for file in files],
                "extents": [[e.file, e.offset, e.nbytes, e.arena] for e in self.plan.extents],
            }
        )
        on_gpu = any(tensor.device.type == "cuda" for named in tensors.values() for tensor in named.values())
        self._stream = torch.cuda.Stream() if on_gpu else None
        self._sources: list[tuple[int, torch.Tensor]] = []
        self._pinned = False
        for position, number in self.plan.headers:  # they stay the same from save to save
            self._map[position : position + len(files[number].header)] = files[number].header
        self._ready = threading.Thread(target=self._populate, daemon=True)
        self._ready.start()

    def _populate(self) -> None:
        """Have the kernel map the memory now, outside the interpreter's lock, and pin it for the GPU."""
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(len(self._map)), MADV_POPULATE_WRITE
        )
        if self._stream is not None:
            try:
                torch.cuda.check_error(
                    torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._map), 0)
                )
                self._pinned = True
            except RuntimeError as error:
                logger.warning("the arena is not pinned, so copying from the GPU is slow: %s", error)

    def fits(self, tensors: Tensors) -> bool:
        """Whether it was made for tensors like these."""
        return self.layout == _describe(tensors)

    def start_copy(self, tensors: Tensors) -> None:
        """Note which values to copy; on a GPU also have it copy behind what it is doing now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            for stem, name in self._keys:
                start = self.plan.starts.get(f"{stem}:{name}")
                if start is not None:
                    self._sources.append((start, as_bytes(local_values(tensors[stem][name]))))

    def begin(self, folder: Path, part_file: Path, attempt: str, read_back: bool) -> None:
        """Tell the writer that a save comes."""
        self._ready.join()
        self._send(
            {"save": str(folder), "part_file": str(part_file), "attempt": attempt, "read_back": read_back}
        )

    def copy(self) -> None:
        """Copy all values in the order in which they are written, and keep the writer informed."""
        told = 0
        with torch.cuda.stream(self._stream):  # which does nothing if there is none
            for start, source in self._sources:
                for begin in range(0, len(source), COPY_BYTES):
                    piece = source[begin : begin + COPY_BYTES]
                    position = start + begin + len(piece)
                    self._bytes[start + begin : position].copy_(piece, non_blocking=True)
                    if position - told >= COPY_BYTES:
                        self._tell(position)
                        told = position
        self._sources.clear()
        self._tell(self.plan.arena_bytes)

    def _tell(self, position: int) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._send({"copied": position})

    def end(self) -> None:
        """Wait until the writer is done.

        Raises:
            SaveFailed: it failed.
            WriterDied: it is gone.
        """
        line = self._writer.stdout.readline()
        if not line:
            raise WriterDied(f"the writer died (exit code {self._writer.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise SaveFailed(answer["error"])

    def kill_writer(self) -> None:
        """End the writer at once; whoever waits for it gets an error."""
        self._writer.kill()

    def close(self) -> None:
        """End the writer."""
        self._ready.join()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned = False
        with contextlib.suppress(BrokenPipeError):  # it is dead already
            self._writer.stdin.close()
        self._writer.wait()
        self._writer.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.stdin.write((json.dumps(message) + "\n").encode())
            self._writer.stdin.flush()
        except BrokenPipeError:
            raise WriterDied(f"the writer died (exit code {self._writer.wait()})") from None


def _describe(tensors: Tensors) -> list[tuple[str, str, torch.dtype, torch.Size]]:
    return [(stem, name, t.dtype, t.shape) for stem, named in tensors.items() for name, t in named.items()]


def _inside(file: FileLayout, folder: str, stem: str) -> FileLayout:
    """The same file, named from the step's folder on, its tensors told apart from other stems'."""
    offsets = {f"{stem}:{name}": offset for name, offset in file.offsets.items()}
    return FileLayout(f"{folder}/{file.name}", file.header, offsets, file.size)
