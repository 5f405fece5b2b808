"""Opening a ledger: the file in the run directory, or the checkpoint's copy if that file is unusable."""

import logging
import sqlite3
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger.checks import check_format, oddity, wrong_with
from cairn.orchestrator.ledger.schema import FORMAT, SCHEMA, UNSHIP, LedgerRun, write_owner
from cairn.run.directory import JOURNALS
from cairn.run.file_system import file_system_of
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
        write_owner(database, run)
    return database


def begin(path: Path, run: LedgerRun, snapshot: Path | None, step: int) -> sqlite3.Connection:
    """A new ledger: a copy of the snapshot, or empty without one."""
    remove_journal(path)  # SQLite would apply a removed file's journal to the new file
    if snapshot:
        write_atomic(path, snapshot.read_bytes(), durable=True)
    database = connect(path)
    with database:
        if snapshot:
            check_format(database, snapshot, FORMAT)
            _rewind(database, step)
            if odd := oddity(database):
                raise CheckpointError(f"{snapshot}: {odd}; resume from another step (--ckpt.resume-step)")
        else:
            database.executescript(SCHEMA)
        write_owner(database, run)
    return database


def connect(path: Path) -> sqlite3.Connection:
    """Open the ledger at `path`; only this process may write to it."""
    database = sqlite3.connect(path)
    # WAL needs memory that all machines share; the other mode works wherever locks do.
    mode = "TRUNCATE" if file_system_of(path).is_network else "WAL"
    database.execute(f"PRAGMA journal_mode = {mode}")
    # synchronous = NORMAL survives a kill. Rows lost in a power cut are restored from the batches' files.
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _rewind(database: sqlite3.Connection, step: int) -> None:
    """Go back to the state after `step` steps: the prompts of later batches wait again."""
    for statement in (
        "DELETE FROM samples WHERE place IN (SELECT place FROM groups WHERE batch <= ?)",
        "DELETE FROM groups WHERE batch <= ?",
        *UNSHIP,
        "DELETE FROM dropped WHERE step > ?",
    ):
        database.execute(statement, (step,))


def remove_journal(path: Path) -> None:
    """Remove SQLite's journal files of a ledger; SQLite would apply them to a new file of the same name."""
    for suffix in JOURNALS:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename the ledger and its journal files to a free name; returns the ledger's new path."""
    n = 1
    while (target := path.with_name(f"{path.stem}_aside_{n}{path.suffix}")).exists():
        n += 1
    for suffix in (*JOURNALS, ""):
        if (part := Path(f"{path}{suffix}")).exists():
            part.rename(f"{target}{suffix}")
    return target
