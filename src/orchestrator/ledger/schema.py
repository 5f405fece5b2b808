"""The schema of a ledger: its tables, and conversions between their rows and values."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cairn.orchestrator.ledger import pieces
from cairn.orchestrator.ledger.pieces import SampledTokens
from cairn.orchestrator.prompt_order import Order, Portion
from cairn.orchestrator.rollouts import Rollout, Sampled, Turn
from cairn.run.messages import ShippedBatch

FORMAT = 7
RESTS = "rests"
"""The reason in `failed` of prompts that the difficulty filter did not issue."""
SCHEMA = (
    """
CREATE TABLE run (
    run_id TEXT NOT NULL, branch TEXT NOT NULL, format INTEGER NOT NULL, seed INTEGER NOT NULL,
    problems INTEGER NOT NULL,          -- of all environments
    prompts_per_step INTEGER NOT NULL, samples_per_prompt INTEGER NOT NULL,
    max_off_policy_steps INTEGER NOT NULL
);
CREATE TABLE sampling (                 -- of all answers that wait
    temperature REAL NOT NULL
);
CREATE TABLE groups (                   -- prompts on which the training is in no checkpoint yet
    place INTEGER PRIMARY KEY,          -- in the run's prompt order
    problem INTEGER NOT NULL,
    tries INTEGER NOT NULL,             -- 1, and 1 more for each time that its answers were dropped
    policy_step INTEGER NOT NULL,       -- of the policy that was served when it was issued
    batch INTEGER,                      -- the optimiser step that it was shipped for
    prompt_ids TEXT,                    -- [] until it is known; NULL where all that is left is the batch
    environment INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE samples (                  -- their answers
    place INTEGER NOT NULL, sample INTEGER NOT NULL, seed INTEGER NOT NULL,
    finish_reason TEXT,                 -- stop, length; NULL while it is partial
    tokens INTEGER,                     -- how many its pieces have; NULL while it is partial, and of programs
    text TEXT NOT NULL,                 -- of a whole answer
    reward REAL,                        -- finite; NULL until the environment has given it
    parts TEXT,                         -- {name: reward, ...}; NULL if it has no parts
    failed TEXT,                        -- why there will be no reward
    calls INTEGER,                      -- of a whole program: how many rows turns and calls have of it
    diverged INTEGER NOT NULL DEFAULT 0, -- how often it asked something else than before a restart
    PRIMARY KEY (place, sample)
);
CREATE TABLE batches (
    step INTEGER PRIMARY KEY,           -- the optimiser step that it is for
    places TEXT NOT NULL,               -- [[first, last], ...]
    samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    digest TEXT NOT NULL,               -- of what is learned from; in metrics.jsonl as batch/digest
    oldest_step INTEGER NOT NULL        -- of the oldest policy that any of its tokens come from
);
CREATE TABLE dropped (
    place INTEGER NOT NULL, try INTEGER NOT NULL, reason TEXT NOT NULL,
    step INTEGER NOT NULL               -- the batch that was made up when they were
);
CREATE TABLE turns (                    -- what the model answered to a rollout that is a program
    place INTEGER NOT NULL, sample INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- 0, 1, ... in the order in which the rollout's calls began
    request TEXT NOT NULL,              -- digest of what was asked, by which a replay recognises it
    branch INTEGER NOT NULL,            -- its context: the branch so far (`kept` tokens) and prompt_ids
    kept INTEGER NOT NULL,
    prompt_ids BLOB NOT NULL,           -- int32, little-endian
    finish_reason TEXT,                 -- stop, length; NULL while it is partial
    tokens INTEGER,                     -- how many its pieces have; NULL while it is partial
    PRIMARY KEY (place, sample, number)
);
CREATE TABLE calls (                    -- what a rollout that is a program was answered by the world
    place INTEGER NOT NULL, sample INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- as in turns
    name TEXT NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (place, sample, number)
);
CREATE TABLE snapshots (                -- of the world of a rollout that is a program: the newest one
    place INTEGER NOT NULL, sample INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- the call that it was taken after
    snapshot NOT NULL,                  -- JSON as TEXT, anything else as BLOB
    PRIMARY KEY (place, sample)
);
CREATE TABLE failed (                   -- prompts that were given up, which no batch has and none will have
    place INTEGER PRIMARY KEY, problem INTEGER NOT NULL,
    step INTEGER NOT NULL,              -- the batch that was made up when they were
    reason TEXT NOT NULL,
    environment INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE environments (             -- of the run; docs/how-to/several-environments.md has their order
    number INTEGER PRIMARY KEY,         -- 0, 1, ...
    label TEXT NOT NULL,
    problems INTEGER NOT NULL,          -- in an epoch of its own
    weight REAL NOT NULL, samples_per_prompt INTEGER NOT NULL
);
CREATE TABLE outcomes (                 -- the newest mean rewards of problems, for the difficulty filter
    place INTEGER PRIMARY KEY,
    environment INTEGER NOT NULL, problem INTEGER NOT NULL,
    epoch INTEGER NOT NULL,             -- of its environment
    step INTEGER NOT NULL,              -- the batch that it is in, or that left it out
    mean REAL NOT NULL                  -- of the rewards of its answers
);
CREATE INDEX outcomes_of_problem ON outcomes (environment, problem, place);
"""
    + pieces.SCHEMA
)
THROWN = """
CREATE TABLE IF NOT EXISTS thrown (     -- tokens of answers that went with their rows and taught nothing
    step INTEGER NOT NULL,              -- the batch that was made up when they went
    fate TEXT NOT NULL,                 -- failed, redrawn, dropped
    tokens INTEGER NOT NULL,
    PRIMARY KEY (step, fate)
)
"""
SHARED = """
CREATE TABLE IF NOT EXISTS shared (     -- prompts whose answers another branch of the run has sampled
    place INTEGER PRIMARY KEY,
    branch TEXT NOT NULL,               -- its name
    since INTEGER NOT NULL              -- the step from which both have started
)
"""
LATER = (THROWN, pieces.EXPERTS, SHARED)
"""A ledger of an earlier version, with the same format, gets these tables when its run goes on."""
THROW = """
INSERT INTO thrown SELECT ?, ?, coalesce(sum(length(token_ids) / 4), 0) FROM pieces WHERE {}
ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens
"""
"""Counts the tokens of the answers that are about to be deleted."""
ANSWERS = ("samples", "pieces", "experts", "turns", "calls", "snapshots")
"""The tables with rows about the answers to a prompt, which go when the prompt's row does."""


def check_format(database: sqlite3.Connection) -> None:
    """Check that a ledger has the format that this version of Cairn writes.

    Raises:
        ValueError: it has another format.
        sqlite3.DatabaseError: it is damaged.
    """
    (found,) = database.execute("SELECT format FROM run").fetchone()
    if found != FORMAT:
        raise ValueError(f"it has format {found}; this version of Cairn reads format {FORMAT}")


# A group whose prompt tokens are unknown can't be shipped again; its row is deleted, and the prompt issued
# anew.
UNSHIP = (
    "DELETE FROM groups WHERE batch > ? AND prompt_ids IS NULL",
    "UPDATE groups SET batch = NULL WHERE batch > ?",
    "DELETE FROM outcomes WHERE step > ? AND place NOT IN (SELECT place FROM failed)",
    "DELETE FROM batches WHERE step > ?",
)
UNSHIP_ONE = tuple(
    statement.replace("batch > ?", "batch = ?").replace("step > ?", "step = ?") for statement in UNSHIP[:3]
)


@dataclass(frozen=True)
class LedgerRun:
    """The run that a ledger belongs to.

    problems: of all its environments. samples_per_prompt: unless an environment has another number. portions:
    its environments; a run of one needs to give none. remembered: for each environment, how many of a
    problem's outcomes are kept; if it is empty, none. That is a setting, which the file does not hold.
    """

    run_id: str
    branch: str
    format: int
    seed: int
    problems: int
    prompts_per_step: int
    samples_per_prompt: int
    max_off_policy_steps: int
    portions: tuple[Portion, ...] = ()
    remembered: tuple[int, ...] = ()

    def remembers(self, environment: int) -> bool:
        """Whether the outcomes of an environment's problems are kept."""
        return environment < len(self.remembered) and self.remembered[environment] > 0

    @cached_property
    def order(self) -> Order:
        """The order of the run's prompts."""
        only = Portion("", self.problems, 1.0, self.samples_per_prompt)
        return Order(self.seed, self.portions or (only,))

    def rows(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """The rows of the tables `run` and `environments`."""
        steps = (self.prompts_per_step, self.samples_per_prompt, self.max_off_policy_steps)
        own = (self.run_id, self.branch, self.format, self.seed, self.problems, *steps)
        environments = [
            (number, one.label, one.problems, one.weight, one.samples_per_prompt)
            for number, one in enumerate(self.order.portions)
        ]
        return [own], environments

    @property
    def owner(self) -> tuple[str, str]:
        """Run id and branch."""
        return self.run_id, self.branch


def write_owner(database: sqlite3.Connection, run: LedgerRun) -> None:
    """Replace the rows of the tables `run` and `environments`."""
    (own,), environments = run.rows()
    database.execute("DELETE FROM run")
    database.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, ?)", own)
    database.execute("DELETE FROM environments")
    database.executemany("INSERT INTO environments VALUES (?, ?, ?, ?, ?)", environments)


def owners(database: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The rows of the tables `run` and `environments`."""
    found = database.execute("SELECT * FROM run").fetchall()
    return found, database.execute("SELECT * FROM environments ORDER BY number").fetchall()


def batch_row(batch: ShippedBatch) -> tuple[int, str, int, int, str, int]:
    """A row of the table `batches`."""
    places = json.dumps(batch.places)
    return batch.step, places, batch.samples, batch.tokens, batch.digest, batch.oldest_step


def batch_of(step: int, places: str, *rest: Any) -> ShippedBatch:
    """The batch in a row of the table `batches`.

    Raises:
        ValueError, TypeError: `places` is not a list of ranges.
    """
    return ShippedBatch(step, [[first, last] for first, last in json.loads(places)], *rest)


_ANSWER = "seed, finish_reason, text, reward, parts, failed, diverged"
INSERT_SAMPLE = (
    f"INSERT OR REPLACE INTO samples (place, sample, {_ANSWER}, tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
SELECT_SAMPLES = f"SELECT place, calls, {_ANSWER} FROM samples"
FINISH_SAMPLE = """
UPDATE samples SET finish_reason = ?, text = ?, reward = ?, parts = ?, failed = ?, diverged = ?, calls = ?
WHERE place = ? AND sample = ?
"""


def sample_row(place: int, sample: int, rollout: Rollout) -> tuple[Any, ...]:
    """A row of the table `samples`: answer number `sample` to the prompt at `place`."""
    what = (rollout.finish_reason, rollout.text, rollout.reward, to_parts(rollout), rollout.failed)
    return (place, sample, rollout.seed, *what, rollout.diverged, _tokens(rollout))


def _tokens(sampled: Sampled) -> int | None:
    return None if sampled.finish_reason is None else len(sampled.token_ids)


def to_parts(rollout: Rollout) -> str | None:
    """The column `parts` of an answer."""
    return json.dumps(rollout.parts) if rollout.parts else None


def rollout_of(row: Sequence[Any], sampled: SampledTokens) -> Rollout:
    """The answer in a row of `SELECT_SAMPLES`, without its place and calls."""
    seed, finish_reason, text, reward, parts, failed, diverged = row
    return Rollout(
        seed,
        sampled.token_ids,
        sampled.logprobs,
        sampled.versions,
        finish_reason,
        text,
        reward,
        json.loads(parts or "{}"),
        failed,
        diverged,
        recorded=len(sampled.token_ids),
    )


# Calls of rollouts that are programs

INSERT_TURN = "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
SELECT_TURNS = "SELECT number, request, branch, kept, prompt_ids, finish_reason FROM turns"
SELECT_BRANCH = """
SELECT number, -1 AS start, prompt_ids AS tokens FROM turns WHERE place = ?1 AND sample = ?2 AND branch = ?3
UNION ALL SELECT number, start, token_ids FROM turns JOIN pieces USING (place, sample, number)
WHERE place = ?1 AND sample = ?2 AND branch = ?3 ORDER BY number, start
"""
INSERT_CALL = "INSERT INTO calls VALUES (?, ?, ?, ?, ?)"
INSERT_SNAPSHOT = "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)"
SELECT_SNAPSHOT = """
SELECT number, name, snapshot FROM snapshots JOIN calls USING (place, sample, number)
WHERE place = ? AND sample = ?
"""


def turn_row(place: int, sample: int, turn: Turn) -> tuple[Any, ...]:
    """A row of the table `turns`."""
    what = (place, sample, turn.number, turn.request, turn.branch, turn.kept)
    return (*what, pieces.to_blob(turn.prompt_ids, "<i4"), turn.finish_reason, _tokens(turn))


def turn_of(row: Sequence[Any], sampled: SampledTokens) -> Turn:
    """The turn in a row of `SELECT_TURNS`."""
    number, request, branch, kept, prompt_ids, finish_reason = row
    return Turn(
        number,
        request,
        branch,
        kept,
        pieces.ints(prompt_ids),
        sampled.token_ids,
        sampled.logprobs,
        sampled.versions,
        finish_reason,
        recorded=len(sampled.token_ids),
    )


def to_ranges(places: Iterable[int]) -> list[list[int]]:
    """The numbers as a list of [first, last] ranges."""
    ranges: list[list[int]] = []
    for place in sorted(places):
        if ranges and place == ranges[-1][1] + 1:
            ranges[-1][1] = place
        else:
            ranges.append([place, place])
    return ranges
