"""Reading a ledger from outside: while its run is going on, or the copy in a checkpoint."""

import contextlib
import itertools
import json
import shutil
import sqlite3
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger import pieces
from cairn.orchestrator.ledger.pieces import ANSWER, Key, SampledSize, SampledTokens, ints
from cairn.orchestrator.ledger.schema import SELECT_SAMPLES, LedgerRun, batch_of, check_format, rollout_of
from cairn.orchestrator.prompt_order import Order, Portion
from cairn.orchestrator.rollouts import AnswerGroup, SharedFrom
from cairn.run.directory import RunDirectory
from cairn.run.messages import ShippedBatch

Row = dict[str, Any]

ANSWERS = """
SELECT groups.batch AS step, place, groups.problem, sample, nullif(environments.label, '') AS environment,
    prompt_ids, text, reward, finish_reason,
    (
        SELECT coalesce(sum(length(token_ids)), 0) / 4 FROM pieces
        WHERE pieces.place = samples.place AND pieces.sample = samples.sample
    ) AS tokens, groups.policy_step
FROM samples JOIN groups USING (place) LEFT JOIN environments ON environments.number = groups.environment
WHERE finish_reason IS NOT NULL ORDER BY place, sample
"""

SAMPLES = "SELECT place, sample, reward, finish_reason, tokens AS noted, failed, calls FROM samples"
TURNS = """
SELECT place, sample, number, branch, kept, length(prompt_ids) / 4 AS prompt, finish_reason, tokens AS noted
FROM turns ORDER BY place, sample, number
"""

PORTIONS = "SELECT label, problems, weight, samples_per_prompt FROM environments ORDER BY number"
WAITING = "SELECT place FROM groups WHERE batch IS NULL ORDER BY place"
WHOLE_ANSWERS = """
SELECT count(*) FROM samples JOIN groups USING (place) WHERE batch IS NULL AND finish_reason IS NOT NULL
"""
TOKENS_AFTER = """
SELECT sum(length(token_ids) / 4) FROM pieces JOIN groups USING (place) WHERE batch IS NULL OR batch > ?
"""

SAMPLED = """
SELECT batch, place, sample, calls, branch, token_ids
FROM groups JOIN samples USING (place) LEFT JOIN pieces USING (place, sample)
LEFT JOIN turns USING (place, sample, number)
WHERE batch NOT NULL AND failed IS NULL ORDER BY batch, place, sample, number, start
"""


@dataclass(frozen=True)
class LedgerContent:
    """The rows of a ledger that an audit needs, all read in one transaction."""

    run: Row
    groups: list[Row]
    samples: list[Row]
    turns: list[Row]
    calls: list[Row]
    batches: dict[int, ShippedBatch]
    dropped: list[Row]
    failed: list[Row]
    outcomes: dict[int, float]
    """The mean reward of the answers to prompts of environments with a difficulty filter, by place, as far as
    it is still needed."""
    portions: tuple[Portion, ...]
    """The run's environments."""
    shared: dict[int, SharedFrom] = field(default_factory=dict[int, SharedFrom])
    """Whose the answers are to prompts that another branch has answered, by place."""

    @cached_property
    def order(self) -> Order:
        """The order of the run's prompts."""
        return Order(self.run["seed"], self.portions)


@dataclass(frozen=True)
class LedgerSummary:
    """What became of each prompt of a run, without answers.

    waiting: the places that no batch has yet; answers: how many whole ones these have. dropped: the rows of
    tries whose answers were thrown away. failed: the rows of prompts that no batch will have.
    """

    order: Order
    batches: dict[int, ShippedBatch]
    waiting: list[int]
    answers: int
    dropped: list[Row]
    failed: list[Row]


def read_summary(path: Path, *, immutable: bool = False) -> LedgerSummary:
    """What became of each prompt; see `open_ledger`. It does not look for damage in what it does not read."""
    with open_ledger(path, immutable=immutable, check=False) as database:
        (seed,) = database.execute("SELECT seed FROM run").fetchone()
        portions = [Portion(*row) for row in database.execute(PORTIONS)]
        batches = [batch_of(*row) for row in database.execute("SELECT * FROM batches ORDER BY step")]
        waiting = [place for (place,) in database.execute(WAITING)]
        (answers,) = database.execute(WHOLE_ANSWERS).fetchone()
        dropped = [dict(row) for row in database.execute("SELECT * FROM dropped ORDER BY step, place")]
        failed = [dict(row) for row in database.execute("SELECT * FROM failed ORDER BY step, place")]
    by_step = {batch.step: batch for batch in batches}
    return LedgerSummary(Order(seed, portions), by_step, waiting, answers, dropped, failed)


@dataclass(frozen=True)
class LedgerTokens:
    """Tokens that no row of metrics.jsonl tells of yet.

    waiting: of answers that are in no batch, or in one that is not trained on yet. thrown: of those that
    went while a later batch was made up, by fate.
    """

    waiting: int
    thrown: dict[str, int]


def read_tokens(path: Path, step: int, *, immutable: bool = False) -> LedgerTokens:
    """What was sampled beyond the rows up to `step`; see `open_ledger`."""
    with open_ledger(path, immutable=immutable, check=False) as database:
        (waiting,) = database.execute(TOKENS_AFTER, (step,)).fetchone()
        has_thrown = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'thrown'").fetchone()
        later = "SELECT fate, sum(tokens) FROM thrown WHERE step > ? GROUP BY fate"
        thrown = database.execute(later, (step,)).fetchall() if has_thrown else []
    return LedgerTokens(waiting or 0, {fate: tokens for fate, tokens in thrown})


def is_quiet(run: RunDirectory) -> bool:
    """Whether nobody writes to the run's ledger: then SQLite has to create no files beside it to read it."""
    beside = any(Path(f"{run.ledger}{end}").exists() for end in ("-wal", "-journal"))
    return not beside and not run.is_locked()


@contextlib.contextmanager
def open_ledger(path: Path, *, immutable: bool = False, check: bool = True) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading, even while its run is writing to it; rows can be accessed by column name.

    Args:
        immutable: no process writes to it, and SQLite must create no files beside it, as in a checkpoint.
        check: read the whole file first, and look for damage.

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
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone() if check else ("ok",)
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            check_format(database)
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
            for name in ("run", "groups", "batches", "dropped", "failed")
        }
        sizes = pieces.sizes(database)
        tables["turns"] = [_sized(dict(row), sizes, row["number"]) for row in database.execute(TURNS)]
        tables["calls"] = [dict(row) for row in database.execute("SELECT place, sample, number FROM calls")]
        answers = (_sized(dict(row), sizes, ANSWER) for row in database.execute(SAMPLES))
        tables["samples"] = _with_turns(answers, tables["turns"])
        (run,) = tables["run"]
        batches = {row["step"]: batch_of(*row.values()) for row in tables["batches"]}
        portions = tuple(Portion(*row) for row in database.execute(PORTIONS))
        outcomes = {place: mean for place, mean in database.execute("SELECT place, mean FROM outcomes")}
        shared = _shared(database)
    of_prompts = {name: tables[name] for name in ("groups", "samples", "turns", "calls", "dropped", "failed")}
    return LedgerContent(
        run=run, batches=batches, portions=portions, outcomes=outcomes, shared=shared, **of_prompts
    )


def _sized(row: Row, sizes: dict[Key, SampledSize], number: int) -> Row:
    """The row of an answer or turn with how many tokens and logprobs were sampled, and by which policies.

    `noted` is the number of tokens that its row tells, if it is whole.
    """
    return row | asdict(sizes.get((row["place"], row["sample"], number), SampledSize()))


def _with_turns(answers: Iterable[Row], turns: list[Row]) -> list[Row]:
    """The answers; what was sampled for one that is a program is what was sampled in its turns."""
    found = {(row["place"], row["sample"]): row for row in answers}
    for turn in turns:
        if sample := found.get((turn["place"], turn["sample"])):
            before = sample["tokens"]
            sample["versions"] += [(name, before + a, before + b) for name, a, b in turn["versions"]]
            sample["tokens"] += turn["tokens"]
            sample["logprobs"] += turn["logprobs"]
    return list(found.values())


WHOLE = """
SELECT problem, policy_step, prompt_ids, environment FROM groups JOIN samples USING (place)
WHERE place = ? AND prompt_ids NOT NULL GROUP BY place
HAVING count(*) = ? AND count(tokens) = count(*) AND count(reward) = count(*)
"""


def read_whole_answers(path: Path, place: int, run: LedgerRun) -> AnswerGroup | None:
    """The answers to the prompt at `place`, if all are whole and rewarded, and none is a program.

    Args:
        run: whoever asks. In a ledger with another seed or other environments, the place has another prompt.

    Raises:
        CheckpointError: see `open_ledger`.
    """
    samples = run.order.portions[run.order.environment(place)].samples_per_prompt
    with open_ledger(path, check=False) as database:
        ((seed,),) = database.execute("SELECT seed FROM run").fetchall()
        portions = tuple(Portion(*row) for row in database.execute(PORTIONS))
        if seed != run.seed or portions != run.order.portions:
            return None
        found = database.execute(WHOLE, (place, samples)).fetchone()
        if found is None:
            return None
        sampled = pieces.read(database, "place = ? AND number = ?", place, ANSWER)
        rows = database.execute(f"{SELECT_SAMPLES} WHERE place = ? ORDER BY sample", (place,))
        rollouts = [
            replace(rollout_of(answer, sampled.get((place, sample, ANSWER), SampledTokens())), recorded=None)
            for sample, (_, _, *answer) in enumerate(rows)
        ]
        shared = _shared(database, "WHERE place = ?", place).get(place)
    problem, policy_step, prompt_ids, environment = found
    return AnswerGroup(place, problem, policy_step, json.loads(prompt_ids), rollouts, environment, shared)


def _shared(database: sqlite3.Connection, which: str = "", *values: object) -> dict[int, SharedFrom]:
    """Whose the answers are to prompts that another branch has answered, by place; old ledgers have none."""
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'shared'").fetchone() is None:
        return {}
    found = database.execute(f"SELECT place, branch, since FROM shared {which}", values)
    return {place: SharedFrom(branch, since) for place, branch, since in found}


def read_answers(path: Path) -> list[Row]:
    """The whole answers, with their prompts and the steps of their batches; see `open_ledger`."""
    with open_ledger(path) as database:
        return [dict(row) for row in database.execute(ANSWERS)]


def read_sampled(path: Path) -> "dict[int, list[tuple[int, int, array[int]]]]":
    """What was sampled for each training sample in each batch that no checkpoint covers.

    Answers that have failed are left out. See `open_ledger`.

    Returns:
        By the batch's step: place and number of the answer, and the tokens, of one sample after the other.
    """
    found: dict[int, list[tuple[int, int, array[int]]]] = {}
    with open_ledger(path) as database:
        answers = itertools.groupby(database.execute(SAMPLED), key=lambda row: tuple(row)[:3])
        for (step, place, sample), rows in answers:
            branches: dict[int | None, array[int]] = {}
            for *_, calls, branch, tokens in rows:
                if calls is None or tokens is not None:
                    branches.setdefault(branch, array("i")).extend(ints(tokens or b""))
            found.setdefault(step, []).extend(
                (place, sample, tokens) for branch, tokens in branches.items() if tokens or branch is None
            )
    return found
