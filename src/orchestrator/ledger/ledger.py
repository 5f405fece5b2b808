"""The ledger, as the orchestrator writes it."""

import contextlib
import json
import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from cairn.orchestrator.ledger.checks import oddity
from cairn.orchestrator.ledger.opening import begin, connect, open_existing, remove_journal, set_aside
from cairn.orchestrator.ledger.schema import (
    INSERT_SAMPLE,
    SELECT_SAMPLES,
    UNSHIP,
    UNSHIP_ONE,
    LedgerRun,
    batch_of,
    batch_row,
    rollout_of,
    sample_row,
    write_owner,
)
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.errors import CairnError
from cairn.run.files import write_atomic
from cairn.run.messages import ShippedBatch

logger = logging.getLogger(__name__)


class LedgerFailed(CairnError):
    """The ledger can't be written or read any more; the message says how to resume."""


class Ledger:
    """The ledger of one branch of a run. Only one process may open it at a time."""

    def __init__(self, path: Path, run: LedgerRun, snapshot: Path | None, step: int):
        """Open the ledger of this run and branch.

        A file that is damaged, belongs to another branch, or contradicts itself or the snapshot is renamed,
        and the ledger begins as a copy of the snapshot, or empty if there is none.

        Args:
            snapshot: the ledger in the checkpoint that the run resumes from, after `step` steps.

        Raises:
            CheckpointError: the snapshot has another format, or contradicts itself.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        found = open_existing(path, run, snapshot, step)
        self.begun = found is None
        """True if no usable file was found, so that the ledger began empty or as a copy of the snapshot."""
        self._database = found or begin(path, run, snapshot, step)
        self._inode = path.stat().st_ino
        self._run = run
        rows = self._database.execute("SELECT * FROM batches").fetchall()
        self._shipped = {row[0]: batch_of(*row) for row in rows}
        """All batches. If another program changes their rows, `_mend` restores them from here."""

    # Prompts and answers

    def issue(self, group: AnswerGroup) -> None:
        """Record that a prompt is about to be answered."""
        tries = self._database.execute("SELECT count(*) FROM dropped WHERE place = ?", (group.place,))
        row = (group.place, group.problem, tries.fetchone()[0] + 1, group.policy_step)
        with self._database:
            self._database.execute(
                "INSERT INTO groups (place, problem, tries, policy_step, prompt_ids) VALUES (?, ?, ?, ?, ?)",
                (*row, json.dumps(group.prompt_ids)),
            )

    def set_prompt(self, group: AnswerGroup) -> None:
        """Record the tokens of a prompt that was issued."""
        row = (json.dumps(group.prompt_ids), group.place)
        with self._database:
            self._database.execute("UPDATE groups SET prompt_ids = ? WHERE place = ?", row)

    def record(self, place: int, rollouts: Mapping[int, Rollout]) -> None:
        """Record answers, whole or partial, to the prompt at `place`; `rollouts` is by answer number."""
        rows = [sample_row(place, i, rollout) for i, rollout in rollouts.items()]
        with self._database:
            self._database.executemany(INSERT_SAMPLE, rows)

    def drop(self, place: int, reason: str, step: int) -> None:
        """Delete a prompt's answers so that it is issued again; `step` is the batch that leaves it out."""
        with self._database:
            self._database.execute(
                "INSERT INTO dropped SELECT place, tries, ?, ? FROM groups WHERE place = ?",
                (reason, step, place),
            )
            self._forget([place])

    def waiting(self) -> list[AnswerGroup]:
        """The prompts that are issued but not shipped, with their answers so far."""
        groups = {
            place: AnswerGroup(place, problem, policy_step, json.loads(prompt_ids), [])
            for place, problem, policy_step, prompt_ids in self._database.execute(
                "SELECT place, problem, policy_step, prompt_ids FROM groups WHERE batch IS NULL"
            )
        }
        rows = self._database.execute(
            f"{SELECT_SAMPLES} WHERE place IN (SELECT place FROM groups WHERE batch IS NULL) "
            "ORDER BY place, sample"
        )
        for place, *answer in rows:
            groups[place].rollouts.append(rollout_of(answer))
        return list(groups.values())

    def sample_at(self, temperature: float, step: int) -> int:
        """Record the temperature from now on; `step` is that of the next batch.

        A batch has one temperature, so waiting prompts with answers at another one are dropped. Returns the
        number of dropped prompts.
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
        """Record that a batch's file exists; `problems` maps each of the batch's places to its problem."""
        groups = [(place, problem, batch.oldest_step) for place, problem in problems.items()]
        self._stay_in_place()
        with self._database:
            self._note(batch)
            for statement in UNSHIP_ONE:
                self._database.execute(statement, (batch.step,))
            # A power cut can lose rows that were not flushed yet; the batch's file restores them.
            self._database.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, 1, ?, NULL, NULL)", groups)
            self._database.executemany(
                "UPDATE groups SET batch = ? WHERE place = ?", [(batch.step, place) for place in problems]
            )
        self._shipped[batch.step] = batch

    def _note(self, batch: ShippedBatch) -> None:
        self._database.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?)", batch_row(batch))

    def shipped(self, step: int) -> ShippedBatch | None:
        """The batch of `step`, or None if it was not shipped."""
        return self._shipped.get(step)

    def unship_after(self, step: int) -> None:
        """Make the prompts of all batches after `step` wait again, as if these had never been shipped."""
        with self._database:
            for statement in UNSHIP:
                self._database.execute(statement, (step,))
        self._shipped = {number: batch for number, batch in self._shipped.items() if number <= step}

    def fold(self, step: int) -> None:
        """Delete the answers in batches up to `step`, once a committed checkpoint covers their training."""
        places = self._database.execute("SELECT place FROM groups WHERE batch <= ?", (step,)).fetchall()
        if places:
            with self._database:
                self._forget([place for (place,) in places])

    def never_issued(self) -> tuple[list[int], int]:
        """Places without a prompt: the gaps, and the first place after all that were issued."""
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
            LedgerFailed: another program has changed the ledger, and the change can't be undone.
        """
        self._mend()
        return self._database.serialize()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError, sqlite3.DatabaseError, LedgerFailed):
            self._mend()
        self._database.close()

    def _mend(self) -> None:
        """Undo changes by another program to the rows of the batches and of the run.

        Raises:
            LedgerFailed: other rows were changed too, and the ledger contradicts itself.
        """
        self._stay_in_place()
        rows = self._database.execute("SELECT * FROM batches ORDER BY step").fetchall()
        owners = self._database.execute("SELECT * FROM run").fetchall()
        if (
            rows == sorted(map(batch_row, self._shipped.values()))
            and owners == [astuple(self._run)]
            and not oddity(self._database)
        ):
            return
        logger.warning("another program has changed %s: its batches are written again", self.path)
        with self._database:
            write_owner(self._database, self._run)
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
        """Write the file again if another program has removed or replaced it."""
        if self.path.exists():
            if self.path.stat().st_ino == self._inode:
                return
            set_aside(self.path)
        logger.warning("%s was removed or replaced: it is written again", self.path)
        content = self._database.serialize()
        self._database.close()
        remove_journal(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, content, durable=True)
        self._database, self._inode = connect(self.path), self.path.stat().st_ino
