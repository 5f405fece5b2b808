"""The schema of a ledger: its tables, and conversions between their rows and values."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from cairn.orchestrator.rollouts import Rollout
from cairn.run.messages import ShippedBatch

FORMAT = 2
SCHEMA = """
CREATE TABLE run (
    run_id TEXT NOT NULL, branch TEXT NOT NULL, format INTEGER NOT NULL, seed INTEGER NOT NULL,
    problems INTEGER NOT NULL,          -- in an epoch
    prompts_per_step INTEGER NOT NULL, samples_per_prompt INTEGER NOT NULL,
    max_off_policy_steps INTEGER NOT NULL
);
CREATE TABLE sampling (                 -- of all answers that wait; missing in ledgers of earlier versions
    temperature REAL NOT NULL
);
CREATE TABLE groups (                   -- prompts on which the training is in no checkpoint yet
    place INTEGER PRIMARY KEY,          -- in the run's prompt order; epoch, index = divmod(place, problems)
    problem INTEGER NOT NULL,
    tries INTEGER NOT NULL,             -- 1, and 1 more for each time that its answers were dropped
    policy_step INTEGER NOT NULL,       -- of the policy that was served when it was issued
    batch INTEGER,                      -- the optimiser step that it was shipped for
    prompt_ids TEXT                     -- [] until it is known; NULL where all that is left is the batch
);
CREATE TABLE samples (                  -- their answers
    place INTEGER NOT NULL, sample INTEGER NOT NULL, seed INTEGER NOT NULL,
    token_ids TEXT NOT NULL, logprobs TEXT NOT NULL,
    versions TEXT NOT NULL,             -- [[policy version, start, end], ...]
    finish_reason TEXT,                 -- stop, length; NULL while it is partial
    text TEXT NOT NULL,                 -- of a whole answer
    reward REAL,                        -- finite; NULL until the environment has given it
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
"""

# A group whose prompt tokens are unknown can't be shipped again; its row is deleted, and the prompt issued
# anew.
UNSHIP = (
    "DELETE FROM groups WHERE batch > ? AND prompt_ids IS NULL",
    "UPDATE groups SET batch = NULL WHERE batch > ?",
    "DELETE FROM batches WHERE step > ?",
)
UNSHIP_ONE = tuple(statement.replace("batch > ?", "batch = ?") for statement in UNSHIP[:2])


@dataclass(frozen=True)
class LedgerRun:
    """The run that a ledger belongs to."""

    run_id: str
    branch: str
    format: int
    seed: int
    problems: int
    prompts_per_step: int
    samples_per_prompt: int
    max_off_policy_steps: int

    @property
    def owner(self) -> tuple[str, str, int]:
        """Run id, branch and format."""
        return self.run_id, self.branch, self.format


def write_owner(database: sqlite3.Connection, run: LedgerRun) -> None:
    """Replace the row of the table `run`."""
    database.execute("DELETE FROM run")
    database.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(run))


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


INSERT_SAMPLE = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
SELECT_SAMPLES = "SELECT place, seed, token_ids, logprobs, versions, finish_reason, text, reward FROM samples"


def sample_row(place: int, sample: int, rollout: Rollout) -> tuple[Any, ...]:
    """A row of the table `samples`: answer number `sample` to the prompt at `place`."""
    lists = (json.dumps(values) for values in (rollout.token_ids, rollout.logprobs, rollout.versions))
    return (place, sample, rollout.seed, *lists, rollout.finish_reason, rollout.text, rollout.reward)


def rollout_of(row: Sequence[Any]) -> Rollout:
    """The answer in a row of `SELECT_SAMPLES`, without its place."""
    seed, token_ids, logprobs, versions, finish_reason, text, reward = row
    spans = [(version, start, end) for version, start, end in json.loads(versions)]
    return Rollout(seed, json.loads(token_ids), json.loads(logprobs), spans, finish_reason, text, reward)


def to_ranges(places: Iterable[int]) -> list[list[int]]:
    """The numbers as a list of [first, last] ranges."""
    ranges: list[list[int]] = []
    for place in sorted(places):
        if ranges and place == ranges[-1][1] + 1:
            ranges[-1][1] = place
        else:
            ranges.append([place, place])
    return ranges
