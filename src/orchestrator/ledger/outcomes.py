"""Outcomes: how good the answers to a problem were, kept when the answers themselves are gone.

Only for environments with a difficulty filter (`LedgerRun.remembered`).
"""

import itertools
import sqlite3
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from cairn.orchestrator.ledger.schema import LedgerRun
from cairn.orchestrator.rollouts import LEAST

REWARDS = """
SELECT environment, problem, reward FROM groups JOIN samples USING (place)
WHERE place = ? AND reward NOT NULL ORDER BY sample
"""
NEWEST = """
SELECT problem, place, epoch, mean, row_number() OVER (PARTITION BY problem ORDER BY place DESC) AS age
FROM outcomes WHERE environment = ? AND step <= ?
"""


class Recent(NamedTuple):
    """A problem's outcomes of late: the mean over them, and the epoch of the newest."""

    mean: float
    epoch: int


def note(database: sqlite3.Connection, run: LedgerRun, places: Iterable[int], step: int) -> list[int]:
    """Note the outcomes of prompts whose answers are rewarded, in the transaction that is open.

    Args:
        step: the batch that they are in, or that leaves them out.

    Returns:
        The places of which there should be an outcome, but no answers are there.
    """
    unknown: list[int] = []
    for place in places:
        if not run.remembers(run.order.environment(place)):
            continue
        rows = database.execute(REWARDS, (place,)).fetchall()
        if len(rows) < LEAST:
            unknown.append(place)
            continue
        environment, problem, _ = rows[0]
        row = place, environment, problem, run.order.epoch(place), step
        mean = statistics.fmean(reward for *_, reward in rows)
        database.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?, ?)", (*row, mean))
    return unknown


def recent(
    database: sqlite3.Connection, environment: int, problem: int, step: int, window: int
) -> Recent | None:
    """The last `window` outcomes of a problem in batches up to `step`; None if there are fewer."""
    rows = database.execute(
        "SELECT mean, epoch FROM outcomes WHERE environment = ? AND problem = ? AND step <= ? "
        "ORDER BY place DESC LIMIT ?",
        (environment, problem, step, window),
    ).fetchall()
    if len(rows) < window:
        return None
    return Recent(statistics.fmean(mean for mean, _ in rows), rows[0][1])


def means(database: sqlite3.Connection, environment: int, step: int, window: int) -> list[float]:
    """The mean of the last `window` outcomes in batches up to `step`, of each problem that has so many."""
    rows = database.execute(
        f"SELECT problem, mean FROM ({NEWEST}) WHERE age <= ? ORDER BY problem, age",
        (environment, step, window),
    )
    each = ([mean for _, mean in own] for _, own in itertools.groupby(rows, key=lambda row: row[0]))
    return [statistics.fmean(own) for own in each if len(own) == window]


def thin_out(database: sqlite3.Connection, run: LedgerRun, step: int) -> None:
    """Delete outcomes in batches up to `step` that no decision after that step can depend on."""
    for environment, window in enumerate(run.remembered):
        if window:
            database.execute(
                f"DELETE FROM outcomes WHERE place IN (SELECT place FROM ({NEWEST}) WHERE age > ?)",
                (environment, step, window),
            )
