"""Checks whether a run can continue with a ledger: undamaged, of this run, and free of contradictions.

A contradiction is whatever could cause a prompt to be trained on twice, or never, without notice.
"""

import bisect
import contextlib
import itertools
import json
import sqlite3
from pathlib import Path
from urllib.parse import quote

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger.schema import READABLE, upgrade

UNWRITTEN = """
SELECT place, sample FROM samples
WHERE json_array_length(token_ids) IS NOT json_array_length(logprobs) OR json_valid(versions) = 0
OR typeof(reward) NOT IN ('null', 'real') OR abs(reward) > 1e37 OR (reward NOT NULL AND finish_reason IS NULL)
OR (reward NOT NULL AND failed NOT NULL) OR json_valid(coalesce(parts, '{}')) = 0
OR calls != (SELECT count(*) FROM turns t WHERE t.place = samples.place AND t.sample = samples.sample)
    + (SELECT count(*) FROM calls c WHERE c.place = samples.place AND c.sample = samples.sample)
UNION SELECT place, sample FROM turns
WHERE length(token_ids) != length(logprobs) OR json_valid(versions) = 0
OR length(token_ids) % 4 != 0 OR length(prompt_ids) % 4 != 0
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
            upgrade(database)  # and roll back
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


def upgrade_copy(database: sqlite3.Connection, snapshot: Path) -> None:
    """Bring a copy of a checkpoint's ledger to the current format.

    Raises:
        CheckpointError: the format can't be read; the message names it.
    """
    try:
        upgrade(database)
    except sqlite3.DatabaseError:
        wanted = f"this version of Cairn reads formats {min(READABLE)} to {max(READABLE)}"
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
