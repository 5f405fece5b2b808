"""Objects in the folders of steps that do not exist: what uploads and deletions have left that were cut."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cairn.checkpoint.manifest import STEP_NAME
from cairn.remote.step_store import ABANDONED, RemoteStore, strangers

FORGOTTEN = timedelta(days=1)
"""Age from which parts and objects of a step are given up that nobody is known to upload."""


@dataclass(frozen=True)
class Leftovers:
    """The objects of a step that does not exist.

    names: relative to the URL. newest: when the last of them was put, by the clock of the object store.
    """

    step: int
    names: tuple[str, ...]
    newest: datetime


@dataclass(frozen=True)
class Aside:
    """A step that was set aside.

    note: name of the object with its manifest. since: when that was put, by the clock of the object store;
    later objects of the step's number are of another step.
    """

    step: int
    note: str
    since: datetime


def leftovers(remote: RemoteStore) -> Iterator[Leftovers]:
    """What is left of steps that are neither committed nor set aside, without what another run has below.

    Raises:
        RemoteError: the object store refuses or fails.
    """
    # Folders come before steps, so that a step that is committed meanwhile does not count as left over.
    folders = remote.objects.folders()
    there, aside = remote.steps(), set_aside(remote)
    numbers = {int(match[1]) for folder in folders if (match := STEP_NAME.fullmatch(folder))}
    for step in sorted(numbers.difference(there)):
        found = left_of(remote, step)
        if found and not any(one.step == step and found.newest <= one.since for one in aside):
            yield found


def left_of(remote: RemoteStore, step: int) -> Leftovers | None:
    """All objects of a step; None if there are none, or those of another run."""
    found = remote.look(step)
    names = strangers(found, ())
    if not names:
        return None
    return Leftovers(
        step, tuple(f"step_{step}/{name}" for name in names), max(found[name].modified for name in names)
    )


def set_aside(remote: RemoteStore) -> list[Aside]:
    """The steps that were set aside because the run has gone back behind them.

    Raises:
        RemoteError: the object store refuses or fails.
    """
    found = remote.objects.look(ABANDONED)
    matches = ((STEP_NAME.fullmatch(Path(name).stem), name) for name in sorted(found))
    return [Aside(int(match[1]), name, found[name].modified) for match, name in matches if match]


def forget(remote: RemoteStore, aside: Aside) -> None:
    """Delete a step that was set aside.

    Its files stay if a step of its number exists, or has been sent to its place since; then the commit of
    that step removes what is not of it.

    Raises:
        RemoteError: the object store refuses or fails.
    """
    remote.objects.delete([aside.note])
    if aside.step in remote.steps():
        return
    left = left_of(remote, aside.step)
    if left is not None and left.newest <= aside.since:
        remote.objects.delete(left.names)
