"""A disk that is behind its run: since its newest attempt, another one has gone on elsewhere."""

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.remote import Objects
from cairn.checkpoint.retention import PINS, pins
from cairn.checkpoint.store import CheckpointStore
from cairn.run.directory import JOURNALS, RunDirectory
from cairn.run.files import make_folders, parse_json, write_atomic, write_json


def catch_up(
    run: RunDirectory, store: CheckpointStore, objects: Objects, small: Iterable[Path], attempt: int
) -> None:
    """Replace what this disk has of the run by what belongs to a remote step, and keep it aside.

    Batches and the ledger are of steps that have been made again, so they go. Pins are united: they say what
    a person wants.

    Args:
        small: the run's small files that are uploaded; one that the object store lacks stays.
        attempt: the number of the newest attempt here.
    """
    aside = store.abandoned / f"overtaken_attempt_{attempt}_{secrets.token_hex(4)}"
    moved: list[str] = []

    def move(path: Path) -> None:
        if path.exists():
            make_folders(aside)
            path.rename(aside / path.name)
            moved.append(path.name)

    for path in small:
        content = objects.get(f"run/{path.name}")
        if content is None:
            continue
        if path.name == PINS:
            _unite(store, content)
            continue
        move(path)  # whoever is killed here gets it at the next start, since it is missing
        make_folders(path.parent)
        write_atomic(path, content, durable=True)
    for path in (run.batches, *(Path(f"{run.ledger}{end}") for end in ("", *JOURNALS))):
        move(path)
    if moved:
        print(
            f"the run has gone on elsewhere since attempt {attempt} here: {', '.join(moved)} of that attempt "
            f"are now in {aside}",
            flush=True,
        )


def _unite(store: CheckpointStore, there: bytes) -> None:
    """Add pins that were uploaded to those here; ones that can't be read are left to whoever needs them."""
    with contextlib.suppress(CheckpointError, ValueError):
        wanted = pins(store) | set(parse_json(there, list[int]))
        make_folders(store.root)
        write_json(store.root / PINS, sorted(wanted), durable=True)
