"""The ledger: every prompt's life survives any end of the process that writes it."""

import contextlib
import itertools
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun, to_ranges
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.messages import ShippedBatch

RUN = LedgerRun("run", "branch_1", FORMAT, 0, 100, 2, 2, 1)


def group(place: int, policy_step: int = 0) -> AnswerGroup:
    """A prompt without answers."""
    return AnswerGroup(place, 10 + place, policy_step, [1, 2, place], [])


def answered(place: int, policy_step: int = 0) -> AnswerGroup:
    """A prompt with one whole answer and a partial one."""
    whole = Rollout(5, [7, 8], [-0.25, -0.5], [(f"run:branch_1:{policy_step}", 0, 2)], "stop", "gh", 0.5)
    partial = Rollout(6, [9], [-1 / 3], [(f"run:branch_1:{policy_step}", 0, 1)])
    return AnswerGroup(place, 10 + place, policy_step, [1, 2, place], [whole, partial])


def fill(ledger: Ledger, *groups: AnswerGroup) -> None:
    """Issue them, and write down the answers that they have."""
    for one in groups:
        ledger.issue(one)
        ledger.record(one.place, dict(enumerate(one.rollouts)))


def ship(ledger: Ledger, step: int, *places: int) -> ShippedBatch:
    """Ship these places for a step."""
    batch = ShippedBatch(step, to_ranges(places), 2 * len(places), 10, f"digest {step}", step - 1)
    ledger.ship(batch, {place: 10 + place for place in places})
    return batch


def reopened(path: Path, snapshot: Path | None = None, step: int = 0, run: LedgerRun = RUN) -> Ledger:
    return Ledger(path, run, snapshot, step)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


def test_what_waits_is_there_again(path: Path):
    """With each answer as far as it had come, whoever opens the ledger next."""
    ledger = reopened(path)
    fill(ledger, answered(0), answered(1, 3), group(2))
    ship(ledger, 1, 0)
    # No close: the process was killed.
    assert reopened(path).waiting() == [answered(1, 3), group(2)]
    assert reopened(path).shipped(1) == ShippedBatch(1, [[0, 0]], 2, 10, "digest 1", 0)
    assert reopened(path).shipped(2) is None


def test_places_that_nobody_was_asked_are_known(path: Path):
    """Dropped ones, holes that a power cut left, and what follows them all."""
    ledger = reopened(path)
    assert ledger.never_issued() == ([], 0)
    fill(ledger, *map(answered, (0, 1, 2, 5)))
    ship(ledger, 1, 0, 2)
    ledger.fold(1)
    assert ledger.never_issued() == ([3, 4], 6)
    ledger.drop(1, "stale", 2)
    assert ledger.never_issued() == ([1, 3, 4], 6)
    fill(ledger, answered(1))
    assert ledger.never_issued() == ([3, 4], 6)
    tries = sqlite3.connect(path).execute("SELECT place, tries FROM groups ORDER BY place").fetchall()
    assert tries == [(1, 2), (5, 1)]


def test_folding_keeps_the_ledger_small(path: Path):
    """Only one row a batch stays of what a checkpoint holds the training on."""
    ledger = reopened(path)
    for step in range(1, 41):
        fill(ledger, answered(2 * step), answered(2 * step + 1))
        ship(ledger, step, 2 * step, 2 * step + 1)
        ledger.fold(step - 1)
    counts = [
        sqlite3.connect(path).execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("groups", "samples", "batches")
    ]
    assert counts == [2, 4, 40]
    assert ledger.shipped(7) == ShippedBatch(7, [[14, 15]], 4, 10, "digest 7", 6)


def test_a_batch_that_is_gone_was_never_shipped(path: Path):
    """Its groups wait again; one of which nothing but the batch was known is a hole."""
    ledger = reopened(path)
    fill(ledger, answered(0), answered(1))
    ship(ledger, 1, 0)
    ship(ledger, 2, 1, 2)  # nobody had issued 2: a power cut has taken the row
    assert ledger.never_issued() == ([], 3)
    ledger.unship_after(1)
    assert ledger.waiting() == [answered(1)]
    assert ledger.shipped(2) is None
    assert ledger.never_issued() == ([], 2)


@pytest.fixture
def snapshot(path: Path) -> Path:
    """Of a ledger at step 2 of which batch 3 was shipped already."""
    ledger = reopened(path)
    fill(ledger, *map(answered, range(8)))
    for step in (1, 2, 3):
        ship(ledger, step, 2 * step - 2, 2 * step - 1)
    ledger.drop(7, "stale", 3)
    file = path.parent / "snapshot"
    file.write_bytes(ledger.snapshot())
    fill(ledger, answered(8))
    ship(ledger, 4, 6, 8)
    ledger.fold(3)
    ledger.close()
    return file


def went_back(ledger: Ledger) -> bool:
    """Whether the ledger is what it was when step 2 was trained."""
    assert ledger.shipped(2) is not None
    assert ledger.shipped(3) is None
    assert ledger.never_issued() == ([], 7)
    return ledger.waiting() == [answered(place) for place in (4, 5, 6)]


def test_the_live_ledger_counts_for_its_own_branch(path: Path, snapshot: Path):
    """Whatever the checkpoint's snapshot says: the ledger knows more."""
    ledger = reopened(path, snapshot, 2)
    assert ledger.shipped(4) is not None
    assert ledger.waiting() == []
    assert not list(path.parent.glob("*aside*"))


@pytest.mark.parametrize("branch", ["branch_1", "branch_2"])
def test_without_a_live_ledger_the_snapshot_is_the_truth(path: Path, snapshot: Path, branch: str):
    """On the same branch, when the file was lost, as on a new one, which begins with what it says."""
    path.unlink()
    run = replace(RUN, branch=branch)
    with contextlib.closing(reopened(path, snapshot, 2, run)) as ledger:
        assert went_back(ledger)
    assert reopened(path, None, 0, run).waiting() == [answered(place) for place in (4, 5, 6)]


def test_a_ledger_of_another_branch_is_set_aside(path: Path, snapshot: Path):
    """And can still be read."""
    before = sqlite3.connect(path).execute("SELECT * FROM batches").fetchall()
    assert went_back(reopened(path, snapshot, 2, replace(RUN, branch="branch_2")))
    (aside,) = path.parent.glob("ledger_aside_*.sqlite")
    assert sqlite3.connect(aside).execute("SELECT * FROM batches").fetchall() == before


@pytest.mark.parametrize("damage", ["cut", "overwritten", "empty", "other"])
def test_a_damaged_ledger_is_set_aside(path: Path, snapshot: Path, damage: str):
    """And the snapshot is taken."""
    whole = path.read_bytes()
    broken = {
        "cut": whole[: len(whole) // 2],
        "overwritten": whole[:4096] + b"\xa5" * (len(whole) - 4096),
        "empty": b"",
        "other": b"not a database at all",
    }[damage]
    path.write_bytes(broken)
    assert went_back(reopened(path, snapshot, 2))
    (aside,) = path.parent.glob("ledger_aside_*.sqlite")
    assert aside.read_bytes() == broken


def test_a_snapshot_of_another_format_is_an_error(path: Path, tmp_path: Path):
    """Rather than a ledger that forgot which prompts were trained."""
    old = sqlite3.connect(tmp_path / "old")
    with old:
        old.execute("CREATE TABLE run (run_id TEXT, branch TEXT)")
    with pytest.raises(CheckpointError, match=r"old has format unknown .an older one.; this version"):
        reopened(path, tmp_path / "old", 2)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_what_they_were_made_from(places: set[int]):
    ranges = to_ranges(places)
    assert [place for first, last in ranges for place in range(first, last + 1)] == sorted(places)
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(ranges))
