"""Opening a ledger: the file in the run directory, or the checkpoint's copy if that file is unusable."""

import logging
import sqlite3
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger.checks import oddity, upgrade_copy, wrong_with
from cairn.orchestrator.ledger.schema import ANSWERS, SCHEMA, UNSHIP, LedgerRun, upgrade, write_owner
from cairn.run.directory import JOURNALS
from cairn.run.file_system import journal_mode
from cairn.run.files import write_atomic

logger = logging.getLogger(__name__)


def open_existing(path: Path, run: LedgerRun, snapshot: Path | None, step: int) -> sqlite3.Connection | None:
    """The ledger at `path`, or None if there is none; a file that fails the checks is renamed and logged."""
    if not path.exists():
        return None
    if wrong := wrong_with(path, run.owner, snapshot, step):
        logger.warning("the ledger can't be used and is renamed to %s: %s", set_aside(path), wrong)
        return None
    database = connect(path)
    with database:
        upgrade(database)
        write_owner(database, run)
    return database


def begin(
    path: Path, run: LedgerRun, snapshot: Path | None, step: int, again: str | None = None
) -> sqlite3.Connection:
    """A new ledger: a copy of the snapshot, or empty without one; `again` as in `Ledger`.

    Whoever dies meanwhile leaves a file that has the snapshot's owner.
    """
    remove_journal(path)  # SQLite would apply a removed file's journal to the new file
    if snapshot:
        write_atomic(path, snapshot.read_bytes(), durable=True)
    database = connect(path)
    with database:
        if snapshot:
            upgrade_copy(database, snapshot)
            _rewind(database, step)
            owner = database.execute("SELECT run_id, branch FROM run").fetchone()
            if again is not None and owner != run.owner:
                _drop_waiting(database, again, step + 1)
            if odd := oddity(database):
                raise CheckpointError(f"{snapshot}: {odd}; resume from another step (--ckpt.resume-step)")
        else:
            database.executescript(SCHEMA)
        write_owner(database, run)
    return database


def connect(path: Path) -> sqlite3.Connection:
    """Open the ledger at `path`; only this process may write to it."""
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA journal_mode = {journal_mode(path)}")
    # synchronous = NORMAL survives a kill. Rows lost in a power cut are restored from the batches' files.
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _rewind(database: sqlite3.Connection, step: int) -> None:
    """Go back to the state after `step` steps: the prompts of later batches wait again."""
    for statement in (
        *(
            f"DELETE FROM {table} WHERE place IN (SELECT place FROM groups WHERE batch <= ?)"
            for table in ANSWERS
        ),
        "DELETE FROM groups WHERE batch <= ?",
        "DELETE FROM dropped WHERE step > ?",
        "DELETE FROM failed WHERE step > ?",
        *UNSHIP,
    ):
        database.execute(statement, (step,))


def _drop_waiting(database: sqlite3.Connection, reason: str, step: int) -> None:
    """Have all prompts issued again; `step` is the batch that leaves them out.

    The outcomes are deleted, too: the numbers of the problems may now mean others.
    """
    database.execute("INSERT INTO dropped SELECT place, tries, ?, ? FROM groups", (reason, step))
    for table in (*ANSWERS, "groups"):
        database.execute(f"DELETE FROM {table}")
    database.execute("DELETE FROM outcomes")


def remove_journal(path: Path) -> None:
    """Remove SQLite's journal files of a ledger; SQLite would apply them to a new file of the same name."""
    for suffix in JOURNALS:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a ledger that nobody needs any more, with its journal files."""
    path.unlink(missing_ok=True)
    remove_journal(path)


def set_aside(path: Path) -> Path:
    """Rename the ledger and its journal files to a free name; returns the ledger's new path."""
    n = 1
    while (target := path.with_name(f"{path.stem}_aside_{n}{path.suffix}")).exists():
        n += 1
    for suffix in (*JOURNALS, ""):
        if (part := Path(f"{path}{suffix}")).exists():
            part.rename(f"{target}{suffix}")
    return target
