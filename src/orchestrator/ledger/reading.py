"""Reading a ledger from outside: while its run is going on, or the copy in a checkpoint."""

import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger.schema import FORMAT, batch_of
from cairn.run.messages import ShippedBatch

Row = dict[str, Any]

ANSWERS = """
SELECT groups.batch AS step, place, groups.problem, sample, prompt_ids, text, reward, finish_reason,
    json_array_length(samples.token_ids) AS tokens, groups.policy_step
FROM samples JOIN groups USING (place) WHERE finish_reason IS NOT NULL ORDER BY place, sample
"""


@dataclass(frozen=True)
class LedgerContent:
    """The rows of a ledger that an audit needs, all read in one transaction."""

    run: Row
    groups: list[Row]
    samples: list[Row]
    batches: dict[int, ShippedBatch]
    dropped: list[Row]


@contextlib.contextmanager
def open_ledger(path: Path, *, immutable: bool = False) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading, even while its run is writing to it; rows can be accessed by column name.

    Args:
        immutable: no process writes to it, and SQLite must create no files beside it, as in a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of another format, even if only a query finds that out.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: there is no ledger, so what was trained can't be proved")
    mode = "immutable=1" if immutable else "mode=ro"
    try:
        with (
            contextlib.nullcontext(path) if immutable else _rolled_back(path) as file,
            contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?{mode}", uri=True)) as database,
        ):
            database.row_factory = sqlite3.Row
            database.execute("BEGIN")
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            (found,) = database.execute("SELECT format FROM run").fetchone()
            if found != FORMAT:
                raise ValueError(f"it has format {found}; this version of Cairn reads format {FORMAT}")
            yield database
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: the ledger is damaged or of another format: {error}") from None


@contextlib.contextmanager
def _rolled_back(path: Path) -> Iterator[Path]:
    """The ledger, or, if its writer died in the middle of a transaction, a copy without that transaction.

    SQLite would write to the ledger to roll it back; so it is with a rollback journal (`connect`), not with a
    WAL.
    """
    journal = Path(f"{path}-journal")
    if not journal.exists():
        yield path
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield path
        return
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
    with tempfile.TemporaryDirectory() as folder:
        for part in (path, journal):
            shutil.copy(part, folder)
        copy = Path(folder) / path.name
        with contextlib.closing(sqlite3.connect(copy)) as database:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield copy


def read_ledger(path: Path, *, immutable: bool = False) -> LedgerContent:
    """The rows that an audit needs; see `open_ledger`."""
    with open_ledger(path, immutable=immutable) as database:
        tables = {
            name: [dict(row) for row in database.execute(f"SELECT * FROM {name}")]
            for name in ("run", "groups", "batches", "dropped")
        }
        samples = database.execute(
            "SELECT place, sample, json_array_length(token_ids) AS tokens, "
            "json_array_length(logprobs) AS logprobs, versions, reward, finish_reason FROM samples"
        )
        tables["samples"] = [{**row, "versions": json.loads(row["versions"])} for row in samples]
        (run,) = tables["run"]
        batches = {row["step"]: batch_of(*row.values()) for row in tables["batches"]}
    return LedgerContent(run, tables["groups"], tables["samples"], batches, tables["dropped"])


def read_answers(path: Path) -> list[Row]:
    """The whole answers, with their prompts and the steps of their batches; see `open_ledger`."""
    with open_ledger(path) as database:
        return [dict(row) for row in database.execute(ANSWERS)]
