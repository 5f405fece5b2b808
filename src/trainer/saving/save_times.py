"""How long saves take, and whether one more ends in time."""

import contextlib
import logging
from collections.abc import Iterable

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.saving.save_deadline import Newest, decide
from cairn.checkpoint.saving.saver import Saved
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.remote.uploads import RunUploads
from cairn.run.directory import RunDirectory
from cairn.run.rates import Span

logger = logging.getLogger(__name__)


class SaveTimes:
    """Of one run, as rank 0 sees them.

    Args:
        last: the run's last step.
    """

    def __init__(self, run: RunDirectory, store: CheckpointStore, ckpt: CkptConfig, last: int):
        self.run = run
        self.store = store
        self._uploads = RunUploads(store, ckpt, last) if ckpt.remote else None

    def note(self, saves: Iterable[Saved]) -> None:
        """Note how long these saves took, from their beginning to their commit."""
        for saved in saves:
            self.run.rates.note("save", self._nbytes(saved.step), saved.durable_seconds)

    def allow(self, step: int, *, saving: bool) -> bool:
        """Whether `step` is still to be saved; logged and noted in the history if there is a deadline.

        Args:
            saving: whether an earlier save is in progress, which has to end first.
        """
        left = self.run.seconds_left()
        if left is None:
            return True
        remote = self._uploads.read() if self._uploads else None
        if remote is not None and remote.given_up is not None:
            remote = None
        committed = self.store.latest()
        nbytes = self._nbytes(committed) if committed else 0
        save = self.run.rates.expected("save", nbytes)
        if save and saving:
            save = Span(save.least, 2 * save.most)
        newest, upload = None, self.run.rates.expected("upload", nbytes)
        if committed:
            waits = remote is not None and committed not in remote.steps
            newest = Newest(committed, waits, upload)
            if upload and remote and remote.uploading:  # which has to end first
                upload = Span(upload.least, 2 * upload.most)
        decision = decide(step, left, save, upload, newest, remote=remote is not None)
        logger.info("step %d: %s", step, decision.reason)
        self.run.history.last_save(step, decision.reason, saves=decision.saves)
        return decision.saves

    def _nbytes(self, step: int) -> int:
        """The bytes of a saved step; 0 if it was deleted meanwhile."""
        with contextlib.suppress(CheckpointError):
            return self.store.manifest(step).nbytes
        return 0
