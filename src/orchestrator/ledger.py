"""The ledger: what became of each prompt, so that nothing is asked for twice and nothing is left out.

One SQLite file in the run directory with one writer. It holds every prompt from when it was given to a
server until a committed checkpoint holds the training on it, with the tokens that came back so far; and, for
ever, one small row for each batch and for each group of answers that was dropped. The life of a prompt:

    issued -> partial tokens -> whole answers -> shipped in a batch -> trained, and folded
                             -> dropped, and issued again
"""

import contextlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger_checks import check_format, oddity, wrong_with
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.errors import CairnError
from cairn.run.files import write_atomic
from cairn.run.messages import ShippedBatch

logger = logging.getLogger(__name__)

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

# Without its prompt a group can't be shipped again, and is issued anew.
UNSHIP = (
    "DELETE FROM groups WHERE batch > ? AND prompt_ids IS NULL",
    "UPDATE groups SET batch = NULL WHERE batch > ?",
    "DELETE FROM batches WHERE step > ?",
)
UNSHIP_ONE = tuple(statement.replace("batch > ?", "batch = ?") for statement in UNSHIP[:2])


class LedgerFailed(CairnError):
    """The ledger can't be written or read any more; the message says how to go on."""


@dataclass(frozen=True)
class LedgerRun:
    """Whose ledger it is."""

    run_id: str
    branch: str
    format: int
    seed: int
    problems: int
    prompts_per_step: int
    samples_per_prompt: int
    max_off_policy_steps: int


class Ledger:
    """The ledger of one branch of a run; to be opened by one process only."""

    def __init__(self, path: Path, run: LedgerRun, snapshot: Path | None, step: int):
        """Open the ledger of this run and branch.

        One that is damaged, of another branch, or at odds with itself or with the snapshot is set aside, and
        the truth is that snapshot: of the checkpoint that the run goes on from, after `step` steps. Without
        one, nothing has happened yet.

        Raises:
            CheckpointError: the snapshot is of another format, or at odds with itself.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        found = _open(path, run, snapshot, step)
        self.begun = found is None
        """Whether it begins here, empty or as the snapshot has it, and nobody has written to it since."""
        self._database = found or self._begin(path, run, snapshot, step)
        self._inode = path.stat().st_ino
        self._run = run
        rows = self._database.execute("SELECT * FROM batches").fetchall()
        self._shipped = {row[0]: ShippedBatch(row[0], json.loads(row[1]), *row[2:]) for row in rows}
        """All batches: nobody else's changes to the file count (`_mend`)."""

    def _begin(self, path: Path, run: LedgerRun, snapshot: Path | None, step: int) -> sqlite3.Connection:
        """The ledger as the snapshot has it, or an empty one."""
        _remove_journal(path)  # of a file that was removed; SQLite would apply it to the new one
        if snapshot:
            write_atomic(path, snapshot.read_bytes(), durable=True)
        database = _connect(path)
        with database:
            if snapshot:
                check_format(database, snapshot, FORMAT)
                _rewind(database, step)
                if odd := oddity(database):
                    raise CheckpointError(f"{snapshot}: {odd}; go on from another step (--ckpt.resume-step)")
            else:
                database.executescript(SCHEMA)
            _own(database, run)
        return database

    # Prompts and answers

    def issue(self, group: AnswerGroup) -> None:
        """Write down that a prompt is about to be answered."""
        tries = self._database.execute("SELECT count(*) FROM dropped WHERE place = ?", (group.place,))
        row = (group.place, group.problem, tries.fetchone()[0] + 1, group.policy_step)
        with self._database:
            self._database.execute(
                "INSERT INTO groups (place, problem, tries, policy_step, prompt_ids) VALUES (?, ?, ?, ?, ?)",
                (*row, json.dumps(group.prompt_ids)),
            )

    def set_prompt(self, group: AnswerGroup) -> None:
        """Write down the tokens of a prompt that was issued."""
        row = (json.dumps(group.prompt_ids), group.place)
        with self._database:
            self._database.execute("UPDATE groups SET prompt_ids = ? WHERE place = ?", row)

    def record(self, place: int, rollouts: Mapping[int, Rollout]) -> None:
        """Write down how far these answers to the prompt at `place` have come, by their number."""
        rows = [
            {
                "place": place,
                "sample": i,
                **vars(rollout),
                **{key: json.dumps(getattr(rollout, key)) for key in ("token_ids", "logprobs", "versions")},
            }
            for i, rollout in rollouts.items()
        ]
        with self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO samples VALUES "
                "(:place, :sample, :seed, :token_ids, :logprobs, :versions, :finish_reason, :text, :reward)",
                rows,
            )

    def drop(self, place: int, reason: str, step: int) -> None:
        """Forget the answers to a prompt, which is to be issued again; `step` would have been their batch."""
        with self._database:
            self._database.execute(
                "INSERT INTO dropped SELECT place, tries, ?, ? FROM groups WHERE place = ?",
                (reason, step, place),
            )
            self._forget([place])

    def waiting(self) -> list[AnswerGroup]:
        """The prompts that were issued and not shipped, with what is there of their answers."""
        groups = {
            place: AnswerGroup(place, problem, policy_step, json.loads(prompt_ids), [])
            for place, problem, policy_step, prompt_ids in self._database.execute(
                "SELECT place, problem, policy_step, prompt_ids FROM groups WHERE batch IS NULL"
            )
        }
        rows = self._database.execute(
            "SELECT place, seed, token_ids, logprobs, versions, finish_reason, text, reward FROM samples "
            "WHERE place IN (SELECT place FROM groups WHERE batch IS NULL) ORDER BY place, sample"
        )
        for place, seed, token_ids, logprobs, versions, finish_reason, text, reward in rows:
            spans = [tuple(span) for span in json.loads(versions)]
            groups[place].rollouts.append(
                Rollout(seed, json.loads(token_ids), json.loads(logprobs), spans, finish_reason, text, reward)
            )
        return list(groups.values())

    def sample_at(self, temperature: float, step: int) -> int:
        """Answers are sampled at this temperature from now on; `step` is that of the next batch.

        A batch has one temperature, so that waiting prompts with answers of another are dropped. Returns how
        many there were.
        """
        with self._database:
            self._database.execute("CREATE TABLE IF NOT EXISTS sampling (temperature REAL NOT NULL)")
        if self._database.execute("SELECT * FROM sampling").fetchall() == [(temperature,)]:
            return 0
        doomed = [group.place for group in self.waiting() if any(one.token_ids for one in group.rollouts)]
        for place in doomed:
            self.drop(place, "temperature", step)
        with self._database:
            self._database.execute("DELETE FROM sampling")
            self._database.execute("INSERT INTO sampling VALUES (?)", (temperature,))
        return len(doomed)

    # Batches

    def ship(self, batch: ShippedBatch, problems: Mapping[int, int]) -> None:
        """Write down that a batch's file is there; `problems` has the problem at each of its places."""
        groups = [(place, problem, batch.oldest_step) for place, problem in problems.items()]
        self._stay_in_place()
        with self._database:
            self._note(batch)
            for statement in UNSHIP_ONE:
                self._database.execute(statement, (batch.step,))
            # Rows that a power cut took come back from the batch's file.
            self._database.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, 1, ?, NULL, NULL)", groups)
            self._database.executemany(
                "UPDATE groups SET batch = ? WHERE place = ?", [(batch.step, place) for place in problems]
            )
        self._shipped[batch.step] = batch

    def _note(self, batch: ShippedBatch) -> None:
        self._database.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?)", _row(batch))

    def shipped(self, step: int) -> ShippedBatch | None:
        """The batch of that step, if it was shipped."""
        return self._shipped.get(step)

    def unship_after(self, step: int) -> None:
        """The batches after `step` are gone, as if they had never been shipped."""
        with self._database:
            for statement in UNSHIP:
                self._database.execute(statement, (step,))
        self._shipped = {number: batch for number, batch in self._shipped.items() if number <= step}

    def fold(self, step: int) -> None:
        """Forget the answers in batches through `step`: a committed checkpoint holds the training on them."""
        places = self._database.execute("SELECT place FROM groups WHERE batch <= ?", (step,)).fetchall()
        if places:
            with self._database:
                self._forget([place for (place,) in places])

    def never_issued(self) -> tuple[list[int], int]:
        """The places at which no prompt was issued: holes among the others, and the first after them all."""
        ranges = [[place, place] for (place,) in self._database.execute("SELECT place FROM groups")]
        for (places,) in self._database.execute("SELECT places FROM batches"):
            ranges += json.loads(places)
        holes, following = [], 0
        for first, last in sorted(ranges):
            holes += range(following, first)
            following = max(following, last + 1)
        return holes, following

    def _forget(self, places: list[int]) -> None:
        for table in ("samples", "groups"):
            self._database.executemany(f"DELETE FROM {table} WHERE place = ?", [(place,) for place in places])

    def snapshot(self) -> bytes:
        """A consistent copy of the whole ledger.

        Raises:
            LedgerFailed: another program has changed it, so that it can't be put right.
        """
        self._mend()
        return self._database.serialize()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError, sqlite3.DatabaseError, LedgerFailed):
            self._mend()
        self._database.close()

    def _mend(self) -> None:
        """Put right what another program has done to the file, as far as this process knows better.

        Raises:
            LedgerFailed: it does not.
        """
        self._stay_in_place()
        rows = self._database.execute("SELECT * FROM batches ORDER BY step").fetchall()
        owners = self._database.execute("SELECT * FROM run").fetchall()
        if (
            rows == sorted(map(_row, self._shipped.values()))
            and owners == [astuple(self._run)]
            and not oddity(self._database)
        ):
            return
        logger.warning("another program has changed %s: its batches are written again", self.path)
        with self._database:
            _own(self._database, self._run)
            self._database.execute("DELETE FROM batches")
            for batch in self._shipped.values():
                self._note(batch)
                self._database.executemany(
                    "UPDATE groups SET batch = ? WHERE place BETWEEN ? AND ?",
                    [(batch.step, first, last) for first, last in batch.places],
                )
        if odd := oddity(self._database):
            raise LedgerFailed(f"another program has changed {self.path}: {odd}")

    def _stay_in_place(self) -> None:
        """Write the ledger again if somebody has removed or replaced its file."""
        if self.path.exists():
            if self.path.stat().st_ino == self._inode:
                return
            _set_aside(self.path)
        logger.warning("%s was removed or replaced: it is written again", self.path)
        content = self._database.serialize()
        self._database.close()
        _remove_journal(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, content, durable=True)
        self._database, self._inode = _connect(self.path), self.path.stat().st_ino


def to_ranges(places: Iterable[int]) -> list[list[int]]:
    """Numbers as [first, last] of the runs that they make."""
    ranges: list[list[int]] = []
    for place in sorted(places):
        if ranges and place == ranges[-1][1] + 1:
            ranges[-1][1] = place
        else:
            ranges.append([place, place])
    return ranges


def _row(batch: ShippedBatch) -> tuple[int, str, int, int, str, int]:
    places = json.dumps(batch.places)
    return batch.step, places, batch.samples, batch.tokens, batch.digest, batch.oldest_step


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    # Survives a kill; of what a power cut may take, the batches' files tell.
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _open(path: Path, run: LedgerRun, snapshot: Path | None, step: int) -> sqlite3.Connection | None:
    """The ledger at `path`, if there is one and nothing speaks against it; otherwise it is set aside."""
    if not path.exists():
        return None
    if wrong := wrong_with(path, astuple(run)[:3], snapshot, step):
        logger.warning("the ledger is set aside as %s: %s", _set_aside(path), wrong)
        return None
    database = _connect(path)
    with database:
        _own(database, run)
    return database


def _own(database: sqlite3.Connection, run: LedgerRun) -> None:
    """Write down whose ledger it is now."""
    database.execute("DELETE FROM run")
    database.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(run))


def _rewind(database: sqlite3.Connection, step: int) -> None:
    """Go back to when `step` steps were trained: what was shipped for later ones is waiting again."""
    for statement in (
        "DELETE FROM samples WHERE place IN (SELECT place FROM groups WHERE batch <= ?)",
        "DELETE FROM groups WHERE batch <= ?",
        *UNSHIP,
        "DELETE FROM dropped WHERE step > ?",
    ):
        database.execute(statement, (step,))


def _remove_journal(path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _set_aside(path: Path) -> Path:
    """Rename the ledger, with what SQLite keeps beside it, to a name that is free."""
    n = 1
    while (target := path.with_name(f"{path.stem}_aside_{n}{path.suffix}")).exists():
        n += 1
    for suffix in ("-wal", "-shm", ""):
        if (part := Path(f"{path}{suffix}")).exists():
            part.rename(f"{target}{suffix}")
    return target
