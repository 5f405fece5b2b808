"""Saving while training goes on.

Parameters and optimiser state change only inside `optimizer.step()`. So a save copies them in a thread while
the next forward and backward run, into an arena of shared memory that is allocated once; a process of its own
(`cairn.checkpoint.writer`) writes the arena out and makes it durable; and rank 0 commits the step when every
rank's part, and every other role's, is there. The loop waits only if the copy is not finished when the next
update comes, or if a save falls due while the previous one is still under way.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.checkpoint.arena import Arena, SaveFailed, Tensors, WriterDied
from cairn.checkpoint.layout import MAX_FILE_BYTES
from cairn.checkpoint.store import CheckpointStore
from cairn.run.faults import fault_point

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A completed save: how long the training loop waited for it, and how long it took until the commit."""

    step: int
    stall_seconds: float
    durable_seconds: float


@dataclass(frozen=True)
class SavingRank:
    """One of the ranks that save together.

    session: names this start of all ranks; what an earlier one left behind is not taken for theirs.
    """

    rank: int
    world_size: int
    session: str


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    part_timeout: seconds to wait for another rank's or role's part. read_back: read what was written again
    from the disk, and compare, before it counts. max_file_bytes: tensors of more go to several files.
    """

    part_timeout: float = 300.0
    read_back: bool = False
    max_file_bytes: int = MAX_FILE_BYTES


class Saver:
    """Saves one rank's part of checkpoints; rank 0 also commits them.

    All ranks call `save` for the same steps. `before_update` goes right before every `optimizer.step()`,
    `check` once a step, `finish` at the end.

    Args:
        rank: whose part it is.
        roles: other roles whose parts belong to a checkpoint, such as orchestrator, and the id they carry.
        before_commit: called by rank 0 in the background when all but the manifest is durable.
        after_commit: called by rank 0 in the background after each commit, as for retention.
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
    ):
        self.store = store
        self.rank, self.session = rank.rank, rank.session
        self.parts = {
            "files": rank.session,
            **{f"trainer{number}": rank.session for number in range(rank.world_size)},
            **(roles or {}),
        }
        self.how = how
        self.before_commit = before_commit
        self.after_commit = after_commit
        self._arena: Arena | None = None
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
            self._arena = Arena(tensors, self.rank, self.how.max_file_bytes)

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
        arena: Arena,
        folders: list[str],
        files: dict[str, bytes],
        about: dict[str, Any],
        started: float,
    ) -> None:
        """The background half of a save."""
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
            arena.end()
            if self.rank == 0:
                self.before_commit()
                self.store.commit(
                    step,
                    self.parts,
                    timeout=self.how.part_timeout,
                    about=about,
                    read_back=self.how.read_back,
                    on_poll=self._check_wanted,
                )
            self._done.append(Saved(step, self._stall, time.monotonic() - started))
            if self.rank == 0:
                self.after_commit(step)
        except BaseException as error:
            arena.broken = True
            self._error = error
