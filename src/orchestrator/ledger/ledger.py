"""The ledger, as the orchestrator writes it."""

import contextlib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cairn.orchestrator.ledger import outcomes, pieces
from cairn.orchestrator.ledger.opening import begin, connect, oddity, open_existing, remove_journal, set_aside
from cairn.orchestrator.ledger.pieces import ANSWER, SampledTokens, spans_of
from cairn.orchestrator.ledger.schema import (
    ANSWERS,
    FINISH_SAMPLE,
    INSERT_CALL,
    INSERT_SAMPLE,
    INSERT_SNAPSHOT,
    INSERT_TURN,
    RESTS,
    SELECT_BRANCH,
    SELECT_SAMPLES,
    SELECT_SNAPSHOT,
    SELECT_TURNS,
    THROW,
    UNSHIP,
    UNSHIP_ONE,
    LedgerRun,
    batch_of,
    batch_row,
    owners,
    rollout_of,
    sample_row,
    to_parts,
    turn_of,
    turn_row,
    write_owner,
)
from cairn.orchestrator.rollouts import AnswerGroup, Call, Rollout, SharedFrom, Turn
from cairn.run.errors import CairnError
from cairn.run.files import write_atomic
from cairn.run.messages import ShippedBatch

logger = logging.getLogger(__name__)


class LedgerFailed(CairnError):
    """The ledger can't be written or read any more; the message says how to resume."""


class Ledger:
    """The ledger of one branch of a run. Only one process may open it at a time."""

    def __init__(
        self, path: Path, run: LedgerRun, snapshot: Path | None, step: int, *, again: str | None = None
    ):
        """Open the ledger of this run and branch.

        A file that is damaged, belongs to another branch, or contradicts itself or the snapshot is renamed,
        and the ledger begins as a copy of the snapshot, or empty if there is none.

        Args:
            snapshot: the ledger in the checkpoint that the run resumes from, after `step` steps.
            again: why the prompts that wait in a snapshot of another branch are issued again, without their
                answers; None: they are gone on with.

        Raises:
            CheckpointError: the snapshot has another format, or contradicts itself.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._database = open_existing(path, run, snapshot, step) or begin(path, run, snapshot, step, again)
        self._inode = path.stat().st_ino
        self.run = run
        rows = self._database.execute("SELECT * FROM batches").fetchall()
        self._shipped = {row[0]: batch_of(*row) for row in rows}
        """All batches. If another program changes their rows, `_mend` restores them from here."""

    # Prompts and answers

    def issue(self, group: AnswerGroup, skipped: Sequence[AnswerGroup] = (), step: int = 0) -> None:
        """Record that a prompt is about to be answered.

        Args:
            skipped: prompts before it that the difficulty filter does not issue.
            step: the batch that leaves these out.
        """
        tries = self._database.execute("SELECT count(*) FROM dropped WHERE place = ?", (group.place,))
        row = (group.place, group.problem, group.environment, tries.fetchone()[0] + 1, group.policy_step)
        with self._database:
            self._database.execute("DELETE FROM shared WHERE place = ?", (group.place,))
            self._give_up(skipped, RESTS, step)
            self._database.execute(
                "INSERT INTO groups (place, problem, environment, tries, policy_step, prompt_ids) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*row, json.dumps(group.prompt_ids)),
            )

    def set_prompt(self, group: AnswerGroup) -> None:
        """Record the tokens of a prompt that was issued."""
        row = (json.dumps(group.prompt_ids), group.place)
        with self._database:
            self._database.execute("UPDATE groups SET prompt_ids = ? WHERE place = ?", row)

    def record(self, place: int, rollouts: Mapping[int, Rollout]) -> None:
        """Record answers, whole or partial, to the prompt at `place`; `rollouts` is by answer number.

        Of one that goes on, only what was sampled since it was recorded last is written.
        """
        with self._database:
            for sample, rollout in rollouts.items():
                if rollout.recorded is None or rollout.finish_reason or rollout.failed is not None:
                    self._database.execute(INSERT_SAMPLE, sample_row(place, sample, rollout))
                pieces.add(self._database, (place, sample, ANSWER), rollout)
                pieces.add_experts(self._database, (place, sample, ANSWER), rollout)
        for rollout in rollouts.values():
            rollout.recorded = len(rollout.token_ids)
            rollout.experts.clear()

    def share(self, group: AnswerGroup, shared: SharedFrom) -> None:
        """Record the whole answers to a prompt that was issued, all of which another branch has sampled."""
        with self._database:
            row = (json.dumps(group.prompt_ids), group.place)
            self._database.execute("UPDATE groups SET prompt_ids = ? WHERE place = ?", row)
            self._database.execute("INSERT INTO shared VALUES (?, ?, ?)", (group.place, *astuple(shared)))
            for sample, rollout in enumerate(group.rollouts):
                self._database.execute(INSERT_SAMPLE, sample_row(group.place, sample, rollout))
                pieces.add(self._database, (group.place, sample, ANSWER), rollout)
        for rollout in group.rollouts:
            rollout.recorded = len(rollout.token_ids)
        group.shared = shared

    def drop(self, place: int, reason: str, step: int) -> None:
        """Delete a prompt's answers so that it is issued again; `step` is the batch that leaves it out."""
        with self._database:
            self._database.execute(
                "INSERT INTO dropped SELECT place, tries, ?, ? FROM groups WHERE place = ?",
                (reason, step, place),
            )
            self._throw(place, "dropped", step)

    def _throw(self, place: int, fate: str, step: int) -> None:
        """Delete a prompt's answers, and count their tokens."""
        self._database.execute(THROW.format("place = ?"), (step, fate, place))
        self._forget([place])

    def thrown(self, step: int) -> dict[str, int]:
        """Tokens that were thrown away while batch `step` was made up, by fate: failed, redrawn, dropped."""
        found = self._database.execute("SELECT fate, tokens FROM thrown WHERE step = ?", (step,))
        return {fate: tokens for fate, tokens in found}

    def waiting(self) -> list[AnswerGroup]:
        """The prompts that are issued but not shipped, with their answers so far."""
        groups = {
            place: AnswerGroup(place, problem, policy_step, json.loads(prompt_ids), [], environment)
            for place, problem, policy_step, prompt_ids, environment in self._database.execute(
                "SELECT place, problem, policy_step, prompt_ids, environment FROM groups WHERE batch IS NULL"
            )
        }
        for place, *shared in self._database.execute("SELECT place, branch, since FROM shared"):
            if place in groups:
                groups[place].shared = SharedFrom(*shared)
        waiting = "place IN (SELECT place FROM groups WHERE batch IS NULL)"
        sampled = pieces.read(self._database, f"{waiting} AND number = {ANSWER}")
        rows = self._database.execute(f"{SELECT_SAMPLES} WHERE {waiting} ORDER BY place, sample")
        for place, calls, *answer in rows:
            rollouts = groups[place].rollouts
            key = place, len(rollouts), ANSWER
            rollouts.append(rollout_of(answer, sampled.get(key, SampledTokens())))
            if calls is not None:
                rollouts[-1].take(self.turns(place, len(rollouts) - 1))
            elif rollouts[-1].failed is not None:
                rollouts[-1].turns = self.turns(place, len(rollouts) - 1)
        for place, sample, versions in self._database.execute(
            "SELECT place, sample, versions FROM pieces JOIN groups USING (place) "
            "JOIN samples USING (place, sample) WHERE batch IS NULL AND calls IS NULL AND number >= 0 "
            "ORDER BY place, sample, number, start"
        ):
            groups[place].rollouts[sample].add_spans(spans_of(versions))
        return list(groups.values())

    def take_experts(self, groups: Iterable[AnswerGroup]) -> None:
        """Give whole groups' answers, and their turns, the experts that servers chose for their tokens.

        Any thread may call it: it reads through a connection of its own, since these are megabytes for a long
        answer. Before it `stay_in_place` is called, on the thread that writes.
        """
        with contextlib.closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as own:
            for group in groups:
                found = pieces.read_experts(own, group.place)
                for sample, rollout in enumerate(group.rollouts):
                    rollout.experts = found.get((group.place, sample, ANSWER), [])
                    for turn in rollout.turns:
                        turn.experts = found.get((group.place, sample, turn.number), [])

    # Calls of rollouts that are programs

    def record_turn(self, place: int, sample: int, turn: Turn) -> None:
        """Record what the model has answered, whole or partial; of one that goes on, what is new."""
        with self._database:
            if turn.recorded is None or turn.finish_reason:
                self._database.execute(INSERT_TURN, turn_row(place, sample, turn))
            pieces.add(self._database, (place, sample, turn.number), turn)
            pieces.add_experts(self._database, (place, sample, turn.number), turn)
        turn.recorded = len(turn.token_ids)
        turn.experts.clear()

    def record_call(self, place: int, sample: int, call: Call, snapshot: str | bytes | None = None) -> None:
        """Record what the world has answered.

        Args:
            snapshot: of the world after the call; it replaces the rollout's earlier one.
        """
        with self._database:
            self._database.execute(INSERT_CALL, (place, sample, *astuple(call)))
            if snapshot is not None:
                self._database.execute(INSERT_SNAPSHOT, (place, sample, call.number, snapshot))

    def newest_snapshot(self, place: int, sample: int) -> tuple[int, str, str | bytes] | None:
        """The number and name of the call after which a rollout's newest snapshot was taken, and that."""
        return self._database.execute(SELECT_SNAPSHOT, (place, sample)).fetchone()

    def turns(self, place: int, sample: int) -> list[Turn]:
        """The turns of a rollout, in order."""
        where = "place = ? AND sample = ?"
        sampled = pieces.read(self._database, where, place, sample)
        rows = self._database.execute(f"{SELECT_TURNS} WHERE {where} ORDER BY number", (place, sample))
        return [turn_of(row, sampled.get((place, sample, row[0]), SampledTokens())) for row in rows]

    def branch(self, place: int, sample: int, branch: int) -> npt.NDArray[np.int32]:
        """The tokens of a branch of a rollout, int32: prompts and answers of its turns, in order."""
        rows = self._database.execute(SELECT_BRANCH, (place, sample, branch))
        return np.frombuffer(b"".join(tokens for *_, tokens in rows), "<i4").astype(np.int32)

    def calls(self, place: int, sample: int) -> list[Turn | Call]:
        """All recorded calls of a rollout, in order."""
        rows = self._database.execute(
            "SELECT number, name, result FROM calls WHERE place = ? AND sample = ?", (place, sample)
        )
        found = [*self.turns(place, sample), *(Call(*row) for row in rows)]
        return sorted(found, key=lambda call: call.number)

    def forget_calls(self, place: int, sample: int, numbers: Iterable[int], rollout: Rollout) -> None:
        """Delete the calls of these numbers, because the program no longer makes them."""
        rows = [(place, sample, number) for number in numbers]
        with self._database:
            for table in ("turns", "pieces", "experts", "calls", "snapshots"):
                what = f"DELETE FROM {table} WHERE place = ? AND sample = ? AND number = ?"
                self._database.executemany(what, rows)
            self._database.execute(
                "UPDATE samples SET diverged = ? WHERE place = ? AND sample = ?",
                (rollout.diverged, place, sample),
            )

    def finish(self, place: int, sample: int, rollout: Rollout, calls: int | None) -> None:
        """Record how a program has ended: its reward, or why it failed.

        Args:
            calls: number of its recorded calls; None if it may be started again.
        """
        what = (rollout.finish_reason, rollout.text, rollout.reward, to_parts(rollout), rollout.failed)
        with self._database:
            self._database.execute(FINISH_SAMPLE, (*what, rollout.diverged, calls, place, sample))
            if calls is not None:
                self._database.execute(
                    "DELETE FROM snapshots WHERE place = ? AND sample = ?", (place, sample)
                )

    def fail(self, group: AnswerGroup, reason: str, step: int, *, fate: str = "failed") -> None:
        """Give a prompt up: it is not issued again. `step` is the batch that leaves it out.

        fate: as what the tokens of its answers are counted, `redrawn` if another prompt takes its place.
        """
        with self._database:
            self._give_up([group], reason, step)
            outcomes.note(self._database, self.run, [group.place], step)
            self._throw(group.place, fate, step)

    def _give_up(self, groups: Sequence[AnswerGroup], reason: str, step: int) -> None:
        rows = [(group.place, group.problem, step, reason, group.environment) for group in groups]
        self._database.executemany(
            "INSERT INTO failed (place, problem, step, reason, environment) VALUES (?, ?, ?, ?, ?)", rows
        )

    def given_up(self, reason: str, step: int) -> Counter[int]:
        """Number of prompts that batch `step` leaves out for this reason, by environment."""
        query = "SELECT environment, count(*) FROM failed WHERE step = ? AND reason = ? GROUP BY environment"
        return Counter(dict(self._database.execute(query, (step, reason)).fetchall()))

    def sample_at(self, temperature: float, step: int) -> list[AnswerGroup]:
        """Record the temperature from now on; `step`: the next batch.

        A batch has one temperature, so waiting prompts with answers at another one are dropped. Returns the
        dropped prompts.
        """
        if self._database.execute("SELECT * FROM sampling").fetchall() == [(temperature,)]:
            return []
        doomed = [group for group in self.waiting() if any(one.versions for one in group.rollouts)]
        for group in doomed:
            self.drop(group.place, "temperature", step)
        with self._database:
            self._database.execute("DELETE FROM sampling")
            self._database.execute("INSERT INTO sampling VALUES (?)", (temperature,))
        return doomed

    # Batches

    def ship(self, batch: ShippedBatch, problems: Mapping[int, int]) -> None:
        """Record that a batch's file exists; `problems` maps each of the batch's places to its problem."""
        groups = [
            (place, problem, batch.oldest_step, self.run.order.environment(place))
            for place, problem in problems.items()
        ]
        self.stay_in_place()
        with self._database:
            self._note(batch)
            for statement in UNSHIP_ONE:
                self._database.execute(statement, (batch.step,))
            # A power cut can lose rows that were not flushed yet; the batch's file restores them.
            self._database.executemany(
                "INSERT OR IGNORE INTO groups (place, problem, tries, policy_step, environment) "
                "VALUES (?, ?, 1, ?, ?)",
                groups,
            )
            self._database.executemany(
                "UPDATE groups SET batch = ? WHERE place = ?", [(batch.step, place) for place in problems]
            )
            self._database.executemany(
                "DELETE FROM snapshots WHERE place = ?", [(place,) for place in problems]
            )
            unknown = outcomes.note(self._database, self.run, problems, batch.step)
        if unknown:
            logger.warning(
                "the ledger has lost the answers to %d prompts of batch %d: as far as it is known which "
                "problems rest, these prompts were never asked",
                len(unknown),
                batch.step,
            )
        self._shipped[batch.step] = batch

    def _note(self, batch: ShippedBatch) -> None:
        self._database.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?)", batch_row(batch))

    def shipped(self, step: int) -> ShippedBatch | None:
        """The batch of `step`, or None if it was not shipped."""
        return self._shipped.get(step)

    def shipped_after(self, step: int) -> list[ShippedBatch]:
        """The batches of later steps than `step` that are on record."""
        return [batch for number, batch in self._shipped.items() if number > step]

    def unship_after(self, step: int) -> None:
        """Make the prompts of all batches after `step` wait again, as if these had never been shipped."""
        with self._database:
            for statement in UNSHIP:
                self._database.execute(statement, (step,))
        self._shipped = {number: batch for number, batch in self._shipped.items() if number <= step}

    def fold(self, step: int, *, spared: int = 0) -> None:
        """Delete the answers in batches up to `step`, once a committed checkpoint covers their training.

        Those in batches up to `spared` stay, for other branches of the run.

        Outcomes go where newer ones count: by then the servers have a policy that is at most
        `max_off_policy_steps` + 1 steps older.
        """
        doomed = "SELECT place FROM groups WHERE batch > ? AND batch <= ?"
        places = self._database.execute(doomed, (spared, step)).fetchall()
        if places:
            with self._database:
                self._forget([place for (place,) in places])
                outcomes.thin_out(self._database, self.run, step - 1 - self.run.max_off_policy_steps)

    # Outcomes

    def recent_outcomes(
        self, environment: int, problem: int, step: int, window: int
    ) -> outcomes.Recent | None:
        """A problem's last `window` outcomes in batches up to `step`; None if there are fewer."""
        return outcomes.recent(self._database, environment, problem, step, window)

    def mean_outcomes(self, environment: int, step: int, window: int) -> list[float]:
        """The mean over these, of each problem of an environment that has as many."""
        return outcomes.means(self._database, environment, step, window)

    # Places

    def never_issued(self) -> tuple[list[int], int]:
        """Places without a prompt: the gaps, and the first place after all that were issued."""
        taken = self._database.execute("SELECT place FROM groups UNION SELECT place FROM failed")
        ranges = [[place, place] for (place,) in taken]
        for (places,) in self._database.execute("SELECT places FROM batches"):
            ranges += json.loads(places)
        holes, following = [], 0
        for first, last in sorted(ranges):
            holes += range(following, first)
            following = max(following, last + 1)
        return holes, following

    def _forget(self, places: list[int]) -> None:
        for table in (*ANSWERS, "groups"):
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
        self.stay_in_place()
        rows = self._database.execute("SELECT * FROM batches ORDER BY step").fetchall()
        if (
            rows == sorted(map(batch_row, self._shipped.values()))
            and owners(self._database) == self.run.rows()
            and not oddity(self._database)
        ):
            return
        logger.warning("another program has changed %s: its batches are written again", self.path)
        with self._database:
            write_owner(self._database, self.run)
            self._database.execute("DELETE FROM batches")
            for batch in self._shipped.values():
                self._note(batch)
                self._database.executemany(
                    "UPDATE groups SET batch = ? WHERE place BETWEEN ? AND ?",
                    [(batch.step, first, last) for first, last in batch.places],
                )
        if odd := oddity(self._database):
            raise LedgerFailed(f"another program has changed {self.path}: {odd}")

    def stay_in_place(self) -> None:
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
