"""Steps that attempts commit although another one has claimed the prefix: their requests arrived late."""

import contextlib
import logging
import secrets
from collections.abc import Collection

from cairn.checkpoint.manifest import CheckpointError
from cairn.remote.step_store import RemoteStore
from cairn.run.attempt import Attempt

logger = logging.getLogger(__name__)


class Overtaken:
    """Finds such steps for the attempt that has claimed the prefix, and uncommits them.

    Args:
        attempt: None if no attempt is under way; then no step is found.
    """

    def __init__(self, remote: RemoteStore, attempt: Attempt | None):
        self._remote = remote
        self._attempt = attempt
        self._known = set[int]()
        """Steps whose manifests were read, and that stay."""

    def find(self) -> list[int]:
        """The steps after the one that the attempt started from, and that another attempt has made."""
        attempt, found = self._attempt, list[int]()
        if attempt is None:
            return found
        for step in self._remote.steps():
            if step <= attempt.start_step or step in self._known:
                continue
            with contextlib.suppress(CheckpointError):
                manifest = self._remote.manifest(step)
                if manifest.run_id == attempt.run_id and manifest.attempt != attempt.number:
                    found.append(step)
                    continue
            self._known.add(step)
        return found

    def set_aside(self, steps: Collection[int]) -> None:
        """Uncommit steps, whether found here or met while committing one of the same number."""
        name = f"of_overtaken_attempts_{secrets.token_hex(4)}"
        self._remote.set_aside(steps, name)
        logger.warning(
            "the remote checkpoints %s, which an older attempt had committed, are set aside: %s/abandoned/%s",
            ", ".join(map(str, steps)),
            self._remote,
            name,
        )
