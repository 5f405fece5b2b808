"""Puts policy versions into an object store, for servers that see no files of the run.

A version has all its objects before the orchestrator knows of it, and keeps them for as long as its folder is
there, which the orchestrator removes once all servers have a newer one. So a kill at any point leaves either
a version that is whole, or objects that nobody was told of; the next process deletes these.
"""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from cairn.policy.stored import LIST
from cairn.remote import Objects
from cairn.run.faults import fault_point
from cairn.run.files import write_json
from cairn.run.messages import STORED, PolicyVersions, StoredVersion
from cairn.run.object_store import TransientError
from cairn.run.waiting import POLL_SECONDS, Backoff

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 20.0
"""How long a failing request is repeated; then the version is tried again later."""
AWAY_SECONDS = 1800.0
"""How long the object store may be away before the trainer fails."""


class PolicyStore:
    """The versions of one trainer process; rank 0 has it.

    Args:
        url: below which they are put; nothing else lies there.
        versions: the run's, whose folders say which objects are needed.
    """

    def __init__(self, url: str, versions: PolicyVersions):
        self._url = url
        self._versions = versions
        self._process = secrets.token_hex(6)  # another one's versions have the same numbers
        self._has_looked = False

    def put(self, folder: Path, name: str, check: Callable[[], object]) -> None:
        """Put the files of a version, which nothing changes any more, and note in its folder where they are.

        Args:
            name: the folder's, once it is announced.
            check: called again and again; what it raises ends the upload.

        Raises:
            RemoteError: the object store refuses, or has not answered for half an hour.
        """
        url = f"{self._url}/{self._process}/{name}"
        backoff, end = Backoff(1.0, 30.0), time.monotonic() + AWAY_SECONDS
        while True:
            try:
                self._delete_what_is_not_needed(beside=f"{self._process}/{name}/")
                self._put(folder, name, url, check)
                break
            except TransientError as error:
                if time.monotonic() > end:
                    raise
                backoff.grow()
                logger.warning(
                    "policy %s waits for the object store, and is tried again in %g s: %s",
                    name, backoff.seconds, error,
                )  # fmt: skip
                again = time.monotonic() + backoff.seconds
                while time.monotonic() < again:
                    check()
                    time.sleep(POLL_SECONDS)
        write_json(folder / STORED, StoredVersion(url).to_json())

    def _put(self, folder: Path, name: str, url: str, check: Callable[[], object]) -> None:
        objects = Objects(url, retry_seconds=REQUEST_SECONDS)
        notes = folder.with_name(f".{name}.sent")

        def sent(count: int) -> None:
            check()

        listing = objects.put_folder(folder, notes, lambda what, total: sent)
        check()
        fault_point("policy.stored_files")
        objects.put(LIST, listing.to_json())
        notes.unlink(missing_ok=True)

    def _delete_what_is_not_needed(self, beside: str) -> None:
        """Delete the objects of versions whose folders are gone, and of those that were never announced, but
        for those whose names begin with `beside`."""
        objects = Objects(self._url, retry_seconds=REQUEST_SECONDS)
        if not self._has_looked:
            for unfinished in objects.unfinished(""):
                objects.abort(unfinished)
            self._has_looked = True
        needed = [f"{one.url.removeprefix(f'{self._url}/')}/" for one in self._versions.stored()]
        objects.delete([one for one, _ in objects.list() if not one.startswith((*needed, beside))])
