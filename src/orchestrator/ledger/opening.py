"""Opening a ledger: the file in the run directory, or the checkpoint's copy if that file is unusable.

A run can continue with a ledger that is undamaged, of this run, and free of contradictions. A contradiction
is whatever could cause a prompt to be trained on twice, or never, without notice.
"""

import bisect
import contextlib
import itertools
import json
import logging
import sqlite3
from pathlib import Path
from urllib.parse import quote

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger.schema import (
    ANSWERS,
    FORMAT,
    LATER,
    SCHEMA,
    THROW,
    UNSHIP,
    LedgerRun,
    check_format,
    write_owner,
)
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
        _add_later(database)
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
            check_copy(database, snapshot)
            _add_later(database)
            _rewind(database, step)
            owner = database.execute("SELECT run_id, branch FROM run").fetchone()
            if again is not None and owner != run.owner:
                _drop_waiting(database, again, step + 1)
            if odd := oddity(database):
                raise CheckpointError(f"{snapshot}: {odd}; resume from another step (--ckpt.resume-step)")
        else:
            database.executescript(SCHEMA)
            _add_later(database)
        write_owner(database, run)
    return database


def _add_later(database: sqlite3.Connection) -> None:
    for table in LATER:
        database.execute(table)


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
    database.execute(THROW.format("true"), (step, "dropped"))
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


# Whether a run can continue with a ledger.


UNWRITTEN = """
WITH sizes AS (
    SELECT place, sample, number, start, length(token_ids) AS bytes, length(logprobs) AS of_logprobs,
        json_valid(versions) AS valid FROM pieces
), placed AS (
    SELECT *, lag(start + bytes / 4, 1, 0)
        OVER (PARTITION BY place, sample, number ORDER BY start) AS expected FROM sizes
), ends AS (SELECT place, sample, number, sum(bytes) / 4 AS tokens FROM sizes GROUP BY place, sample, number)
SELECT place, sample FROM samples
WHERE typeof(reward) NOT IN ('null', 'real') OR abs(reward) > 1e37
OR (reward NOT NULL AND finish_reason IS NULL)
OR (reward NOT NULL AND failed NOT NULL) OR json_valid(coalesce(parts, '{}')) = 0
OR calls != (SELECT count(*) FROM turns t WHERE t.place = samples.place AND t.sample = samples.sample)
    + (SELECT count(*) FROM calls c WHERE c.place = samples.place AND c.sample = samples.sample)
UNION SELECT place, sample FROM turns WHERE length(prompt_ids) % 4 != 0
UNION SELECT place, sample FROM placed
WHERE start != expected OR bytes != of_logprobs OR bytes % 4 != 0 OR valid = 0
UNION SELECT place, sample FROM (
    SELECT place, sample, -1 AS number, tokens AS wanted FROM samples
    UNION ALL SELECT place, sample, number, tokens FROM turns
) LEFT JOIN ends USING (place, sample, number) WHERE wanted != coalesce(ends.tokens, 0)
UNION SELECT place, sample FROM ends WHERE NOT EXISTS (
    SELECT 1 FROM samples s WHERE s.place = ends.place AND s.sample = ends.sample
) OR number >= 0 AND NOT EXISTS (
    SELECT 1 FROM turns t WHERE t.place = ends.place AND t.sample = ends.sample AND t.number = ends.number
)
"""
"""Selects answers that the orchestrator can't have written like this."""
NOWHERE = (0, -1, 0)


def wrong_with(path: Path, owner: tuple[str, str], snapshot: Path | None, step: int) -> str | None:
    """Why the run can't continue with the ledger at `path`, in words; None if it can.

    Args:
        owner: the run id and branch that the ledger must have.
        snapshot: the ledger in the checkpoint that the run resumes from, after `step` steps.
    """
    batches = f"SELECT * FROM batches WHERE step <= {step} ORDER BY step"
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            if database.execute("PRAGMA quick_check").fetchall() != [("ok",)]:
                return "it is damaged"
            if database.execute("SELECT run_id, branch FROM run").fetchall() != [owner]:
                return "it belongs to another run or branch"
            check_format(database)
            if odd := oddity(database):
                return odd
            trained = database.execute(batches).fetchall()
    except sqlite3.DatabaseError as error:
        return f"it is damaged ({error})"
    except ValueError as error:
        return str(error)
    if snapshot:
        uri = f"file:{quote(str(snapshot))}?immutable=1"  # so that SQLite writes no files into the checkpoint
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            if trained != database.execute(batches).fetchall():
                return f"its batches through step {step} are not those of the checkpoint"
    return None


def check_copy(database: sqlite3.Connection, snapshot: Path) -> None:
    """Check that a copy of a checkpoint's ledger has the format that this version of Cairn writes.

    Raises:
        CheckpointError: it has another format; the message names it.
    """
    try:
        check_format(database)
    except sqlite3.DatabaseError:
        wanted = f"this version of Cairn reads format {FORMAT}"
        raise CheckpointError(f"{snapshot} has format unknown (an older one); {wanted}") from None
    except ValueError as error:
        raise CheckpointError(f"{snapshot}: {error}") from None


def oddity(database: sqlite3.Connection) -> str | None:
    """A contradiction in the ledger, in words; None if there is none.

    Raises:
        sqlite3.DatabaseError: the ledger can't be read.
    """
    try:
        spans = sorted(
            (first, last, step)
            for step, places in database.execute("SELECT step, places FROM batches")
            for first, last in json.loads(places)
        )
    except (ValueError, TypeError) as error:
        return f"the list of prompts in a batch can't be read ({error})"
    for (_, end, owner), (first, _, step) in itertools.pairwise(spans):
        if first <= end:
            return f"prompt {first} is in batch {owner} and in batch {step}"
    starts = [first for first, _, _ in spans]
    for place, valid in database.execute(
        "SELECT place, json_valid(prompt_ids) FROM groups WHERE batch IS NULL ORDER BY place"
    ):
        _, end, owner = spans[before] if (before := bisect.bisect_right(starts, place) - 1) >= 0 else NOWHERE
        if place <= end:
            return f"prompt {place} is waiting and also in batch {owner}"
        if not valid:
            return f"prompt {place} can't be read"
    for place, sample in database.execute(UNWRITTEN):
        return f"answer {sample} to prompt {place} is not as it was written"
    for (place,) in database.execute(
        "SELECT place FROM samples GROUP BY place HAVING max(sample) + 1 != count(*) OR min(sample) != 0"
    ):
        return f"an answer to prompt {place} is missing"
    return None
