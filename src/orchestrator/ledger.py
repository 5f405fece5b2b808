"""The ledger: what became of each prompt, so that a restarted orchestrator asks for nothing twice.

One SQLite file in the run directory with one writer. A group (a prompt's answers) is written down when its
answers are there, before anything else is made of them; when it is shipped in a batch that is noted. Rows of
batches that a committed checkpoint has made needless are folded into one count per epoch.
"""

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from cairn.orchestrator.rollouts import Group, Rollout

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (run_id TEXT NOT NULL, branch TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    place INTEGER PRIMARY KEY,  -- in the run's prompt order
    problem INTEGER NOT NULL,
    step INTEGER NOT NULL,      -- the optimiser step that it was sampled for
    version TEXT NOT NULL,      -- the policy that it was sampled from
    shipped INTEGER NOT NULL DEFAULT 0,
    prompt_ids TEXT NOT NULL,
    rollouts TEXT NOT NULL      -- token ids, logprobs, versions, text, reward of each answer
);
CREATE TABLE IF NOT EXISTS folded (first INTEGER NOT NULL, last INTEGER NOT NULL);  -- trained places
"""


class Ledger:
    """The groups of a run that are not yet safe in a checkpoint."""

    def __init__(self, path: Path, run_id: str, branch: str):
        """Open the ledger of this run and branch, or begin it; one of another run or branch is begun anew."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = self._open()
        if self._database.execute("SELECT run_id, branch FROM run").fetchall() != [(run_id, branch)]:
            with self._database:
                for table in ("run", "groups", "folded"):
                    self._database.execute(f"DELETE FROM {table}")
                self._database.execute("INSERT INTO run VALUES (?, ?)", (run_id, branch))

    def _open(self) -> sqlite3.Connection:
        """The database; a damaged one is put aside, and what it held is sampled again."""
        try:
            database = sqlite3.connect(self.path)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(
                "PRAGMA synchronous = NORMAL"
            )  # survives a kill; a power cut may cost the last rows
            database.executescript(SCHEMA)
            return database
        except sqlite3.DatabaseError:
            database.close()
            self.path.replace(self.path.with_suffix(".damaged"))
            return self._open()

    def finish(self, group: Group, step: int, version: str) -> None:
        """Write down a group whose answers are all there."""
        rollouts = json.dumps([vars(rollout) for rollout in group.rollouts])
        row = (group.place, group.problem, step, version, json.dumps(group.prompt_ids), rollouts)
        with self._database:
            self._database.execute(
                "INSERT OR REPLACE INTO groups (place, problem, step, version, prompt_ids, rollouts) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )

    def finished(self, place: int, step: int, version: str) -> Group | None:
        """The group at `place`, if its answers were sampled for this step from this policy."""
        row = self._database.execute(
            "SELECT problem, prompt_ids, rollouts FROM groups WHERE place = ? AND step = ? AND version = ?",
            (place, step, version),
        ).fetchone()
        if row is None:
            return None
        problem, prompt_ids, rollouts = row
        return Group(
            place, problem, json.loads(prompt_ids), [Rollout(**item) for item in json.loads(rollouts)]
        )

    def ship(self, places: Iterable[int]) -> None:
        """Note that these groups are in a batch file."""
        with self._database:
            self._database.executemany(
                "UPDATE groups SET shipped = 1 WHERE place = ?", [(p,) for p in places]
            )

    def fold(self, step: int) -> None:
        """Forget the groups of steps through `step`, which a committed checkpoint holds the training on."""
        with self._database:
            first, last = self._database.execute(
                "SELECT min(place), max(place) FROM groups WHERE step <= ?", (step,)
            ).fetchone()
            if first is not None:
                self._database.execute("INSERT INTO folded VALUES (?, ?)", (first, last))
                self._database.execute("DELETE FROM groups WHERE step <= ?", (step,))

    def snapshot(self) -> bytes:
        """A consistent copy of the whole ledger."""
        return self._database.serialize()

    def close(self) -> None:
        """Close the file."""
        self._database.close()
