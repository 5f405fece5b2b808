"""Saving while training goes on.

Parameters and optimiser state change only inside `optimizer.step()`. So a save copies them in a thread during
the next forward and backward passes, into an arena of shared memory that is allocated once. A separate
process (`cairn.checkpoint.saving.writer`) writes the arena to disk and fsyncs it. Rank 0 commits the step
when the parts of every rank and every other role are there. The loop waits only if the copy is not finished
before the next update, or if a save is due while the previous one is still in progress.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import FileEntry
from cairn.checkpoint.saving.arena import Arena, SaveFailed, WriterDied
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.saving.unchanged_files import (
    Carried,
    ConstantFiles,
    Names,
    announce_links,
    carry,
    wait_for_links,
)
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES
from cairn.run.faults import fault_point
from cairn.run.waiting import Span

logger = logging.getLogger(__name__)

CARRIED = "carried"
"""The part of a step that lists the files which it has taken over."""


@dataclass(frozen=True)
class Saved:
    """A completed save: seconds that the training loop waited for it, seconds until the commit, and when that
    was, in seconds since 1970."""

    step: int
    stall_seconds: float
    durable_seconds: float
    committed: float


@dataclass(frozen=True)
class SavingRank:
    """One of the ranks that save together.

    session: identifies this start of all ranks, so that files of an earlier start are not mistaken for
    theirs.
    """

    rank: int
    world_size: int
    session: str


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    part_timeout: seconds to wait for another rank's or role's part. read_back: read everything again from the
    disk and compare, before the save counts. max_file_bytes: a larger set of tensors is split into files.
    room: how many bytes of memory the copy of this rank's state may have, given how many it takes; with less,
    the copy waits for the disk. Called by all ranks together. packed: folders within the step whose tensor
    files are compressed (`checkpoint.packed`). constant: tensors that no step changes, by stem: their files
    are links to those of the step before (`checkpoint.constant`). carried: files that rank 0 takes over as
    they are (`checkpoint.carried`), by name within the step. parent: the folder of the step before the first.
    """

    part_timeout: float = 300.0
    read_back: bool = False
    max_file_bytes: int = MAX_FILE_BYTES
    room: Callable[[int], int] = lambda nbytes: nbytes
    packed: Collection[str] = ()
    constant: Names = field(default_factory=dict[str, Collection[str]])
    carried: Mapping[str, Carried] = field(default_factory=dict[str, Carried])
    parent: Path | None = None


class Saver:
    """Saves one rank's part of checkpoints; rank 0 also commits them.

    All ranks call `save` for the same steps, `before_update` right before every `optimizer.step()`, `check`
    once a step, and `finish` at the end.

    Args:
        rank: the rank that saves.
        roles: other roles that write parts of a checkpoint, such as orchestrator, and the id that each part
        has.
        before_commit: called by rank 0 in the background when everything but the manifest is durable.
        after_commit: called by rank 0 in the background after each commit, for example for retention.
        while_waiting: called again and again while another rank or role is waited for, with the name of the
        part that is not there, if it is one; an error that it raises ends the save, and the wait of a loop
        for that save.
    """

    def __init__(
        self,
        store: CheckpointStore,
        rank: SavingRank,
        *,
        roles: Mapping[str, str] | None = None,
        how: SaveOptions = SaveOptions(),  # noqa: B008 # it is frozen
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[int], None] = lambda step: None,
        while_waiting: Callable[[str], None] = lambda part: None,
    ):
        self.store = store
        self.rank, self.session = rank.rank, rank.session
        self.parts = {
            "files": rank.session,
            **{f"trainer{number}": rank.session for number in range(rank.world_size)},
            **(roles or {}),
        }
        if how.constant:
            self.parts |= {f"constant{number}": rank.session for number in range(rank.world_size)}
        if how.carried:
            self.parts |= {CARRIED: rank.session}
        self.how = how
        self._parent = how.parent
        self.before_commit = before_commit
        self.after_commit = after_commit
        self.while_waiting = while_waiting
        self._arena: Arena | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stall = 0.0
        self._done: list[Saved] = []
        self._given_up = threading.Event()

    def prepare(self, tensors: Tensors) -> None:
        """Allocate the arena for tensors like these in the background; otherwise `save` does it."""
        if self._arena is None or self._arena.broken or not self._arena.fits(tensors):
            self.finish()
            self.close()
            how = self.how
            self._arena = Arena(
                tensors, self.rank, how.max_file_bytes, how.room, packed=how.packed, constant=how.constant
            )

    def save(self, step: int, tensors: Tensors, files: Mapping[str, bytes], about: dict[str, Any]) -> None:
        """Begin to save `step`; the tensors must not change until `before_update` has returned.

        If the previous save is still in progress, this waits for it.

        Args:
            files: small files that rank 0 writes, by name within the step.
            about: the manifest's fields that describe the run (see `CheckpointStore.commit`).

        Raises:
            SaveFailed: the previous save failed.
        """
        started = time.monotonic()
        if self.saving:
            logger.warning("saving step %d waits, because the previous save is still being written", step)
        self.finish()
        self.prepare(tensors)
        assert self._arena is not None
        self._arena.start_copy(tensors)
        constant = ConstantFiles(tensors, self.how.constant, self.rank, self.how.max_file_bytes)
        self._copied.clear()
        folders = sorted({name.rpartition("/")[0] for name in [*tensors, *files, *self.how.carried]})
        self._thread = threading.Thread(
            target=self._run,
            args=(step, self._arena, constant, folders, dict(files), about, started),
            name="save",
            daemon=True,
        )
        self._thread.start()
        self._stall = time.monotonic() - started

    @property
    def saving(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def before_update(self) -> None:
        """Wait until the state has been copied; call it right before the state changes."""
        if not self._copied.is_set():
            started = time.monotonic()
            self._copied.wait()
            self._stall += time.monotonic() - started

    def check(self) -> list[Saved]:
        """The saves that were completed since the last call.

        Raises:
            SaveFailed: a save failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            kind = WriterDied if isinstance(error, WriterDied) else SaveFailed
            raise kind(f"saving failed: {error}{_what_to_do(error)}") from error
        done, self._done = self._done, []
        return done

    def finish(self) -> None:
        """Wait for the save in progress.

        Raises:
            SaveFailed: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            done = self.check()
            self._done = done

    def close(self) -> None:
        """End the writer and free the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def abandon(self) -> None:
        """Give up the save in progress, if there is one, and close.

        Once this returns, nothing writes into the step's folder any more, so other ranks may save that step.
        """
        self._given_up.set()
        if self._arena is not None:
            self._arena.kill_writer()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.close()

    def _check_wanted(self, part: str = "") -> None:
        if self._given_up.is_set():
            raise SaveFailed("the save was abandoned")
        self.while_waiting(part)

    def _run(
        self,
        step: int,
        arena: Arena,
        constant: ConstantFiles,
        folders: list[str],
        files: dict[str, bytes],
        about: dict[str, Any],
        started: float,
    ) -> None:
        """The part of a save that runs in the background."""
        try:
            receipt = self.store.receipt_file(step, f"trainer{self.rank}")
            try:
                if self.rank == 0:
                    fault_point("save.begin")
                    self.store.begin(step, folders, self.session)
                else:
                    self.store.wait_for_begin(
                        step, self.session, timeout=self.how.part_timeout, on_poll=self._check_wanted
                    )
                arena.begin(self.store.folder(step), receipt, self.session, self.how.read_back)
                fault_point("save.copy")
                arena.copy()
            finally:
                self._copied.set()
            if self.rank == 0:
                small = {**files, **arena.indices}
                self.store.write_part(step, "files", small, self.session, read_back=self.how.read_back)
                self._carry(step)
            linked = self._save_constant(step, constant)
            arena.end()
            if self.rank == 0:
                self.before_commit()
                self.store.commit(
                    step,
                    self.parts,
                    timeout=self.how.part_timeout,
                    about=about,
                    read_back=self.how.read_back,
                    linked=linked,
                    on_poll=self._check_wanted,
                )
            self._parent = self.store.folder(step)
            self._done.append(Saved(step, self._stall, time.monotonic() - started, time.time()))
            if self.rank == 0:
                self.after_commit(step)
        except BaseException as error:
            arena.broken = True
            self._error = error

    def _carry(self, step: int) -> None:
        """Take over the files that are to be taken over."""
        if self.how.carried:
            carry(
                self.how.carried,
                self._parent,
                self.store.folder(step),
                self.store.receipt_file(step, CARRIED),
                self.session,
                read_back=self.how.read_back,
                on_piece=self._check_wanted,
            )

    def _save_constant(self, step: int, constant: ConstantFiles) -> dict[str, FileEntry]:
        """Link or write the files of constant tensors; on rank 0, returns the links."""
        if not constant.files:
            return {}
        folder, read_back = self.store.folder(step), self.how.read_back
        links: dict[str, FileEntry] = {}
        if self.rank == 0:
            links = constant.link(self._parent, folder, read_back=read_back)
            announce_links(folder, self.session, links)
        linked = wait_for_links(
            folder, self.session, timeout=self.how.part_timeout, on_poll=self._check_wanted
        )
        receipt = self.store.receipt_file(step, f"constant{self.rank}")
        constant.save(folder, linked, receipt, self.session, read_back=read_back, on_piece=self._check_wanted)
        return links


def _what_to_do(error: BaseException) -> str:
    """What the user can do about a save that failed."""
    if os.strerror(errno.ENOSPC) not in str(error) and os.strerror(errno.EDQUOT) not in str(error):
        return ""
    return (
        ". All steps that `ckpt list` calls complete are there: free space, and repeat the command with "
        "--ckpt.resume auto"
    )


# Whether a run that must end soon still saves its newest step, and what becomes of its uploads. A save that
# does not end in time is worth nothing, and takes the disk and the network from an upload that would have
# ended. So both are compared with how long the newest ones took.


@dataclass(frozen=True)
class Newest:
    """The newest step that is saved.

    waits: whether it still has to be uploaded. upload: how long that takes, if it was ever measured.
    """

    step: int
    waits: bool = False
    upload: Span | None = None


@dataclass(frozen=True)
class LastSave:
    """Whether the step is saved, and why, in words with the times that decided."""

    saves: bool
    reason: str


def decide(
    step: int, left: float, save: Span | None, upload: Span | None, newest: Newest | None, *, remote: bool
) -> LastSave:
    """Decide on the save of `step` for a run that must end in `left` seconds.

    - A save that the quickest of the newest ones would not end is not begun.
    - One that ends only if it is quicker than the slowest is begun if no upload needs the time.
    - Without a measurement it is begun.

    Args:
        save: how long a save takes, a save in progress included; None: it was never measured.
        upload: the same of the step's upload, the uploads before it included.
        newest: the newest step that is saved; None if there is none.
        remote: whether steps are uploaded.
    """
    time = f"{max(left, 0):.0f} s are left"
    if save is None:
        return LastSave(True, f"{time}; no save was measured yet: step {step} is saved all the same")
    waits = newest is not None and newest.waits
    if left < save.least or (left < save.most and waits):
        return LastSave(False, f"{time}, and a save takes {save}{_what_is_left(newest, left, remote)}")
    risky = "" if left >= save.most else ", so it may not end"
    start = f"{time}, and a save takes {save}{risky}: step {step} is saved"
    if not remote:
        return LastSave(True, start)
    if upload is None:
        return LastSave(True, f"{start}; no upload was measured yet: it is uploaded as far as time allows")
    if save.most + upload.most <= left:
        return LastSave(True, f"{start} and uploaded, which takes {upload}")
    first = ""
    if newest is not None and newest.waits and newest.upload is not None and newest.upload.most <= left:
        first = f", so step {newest.step} is uploaded first, which takes {newest.upload}"
    return LastSave(True, f"{start} on this disk; its upload, which takes {upload}, may not end{first}")


def _what_is_left(newest: Newest | None, left: float, remote: bool) -> str:
    """What a run keeps that does not save its newest step."""
    if newest is None:
        return "; no earlier step is saved"
    if not remote:
        return f"; step {newest.step} is saved"
    if not newest.waits:
        return f"; step {newest.step} is saved and uploaded"
    takes = f", which takes {newest.upload}" if newest.upload else ""
    ends = "" if newest.upload is None or newest.upload.most <= left else " and may not end"
    return f"; step {newest.step} is saved, and the time goes to its upload{takes}{ends}"
