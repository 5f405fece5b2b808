"""The ledger: every prompt's life survives any end of the process that writes it."""

import contextlib
import itertools
import sqlite3
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger import (
    FORMAT,
    Ledger,
    LedgerRun,
    LedgerTokens,
    opening,
    read_ledger,
    read_tokens,
    to_ranges,
)
from cairn.orchestrator.rollouts import AnswerGroup, Call, Rollout, Turn
from cairn.policy.generation import Generation, VersionSpan
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


def test_tokens_that_no_batch_has_are_counted_whoever_is_killed(path: Path):
    """Those that were thrown away while a batch was made up, and those that wait."""
    ledger = reopened(path)
    fill(ledger, *map(answered, range(6)))
    ledger.drop(0, "stale", 2)
    ledger.fail(ledger.waiting()[0], "the sandbox died", 2)
    ledger.fail(ledger.waiting()[0], "all answers have the same reward", 2, fate="redrawn")
    ship(ledger, 1, 3)
    thrown = {"dropped": 3, "failed": 3, "redrawn": 3}
    assert read_tokens(path, 0) == LedgerTokens(9, thrown), "a batch that nobody has trained on waits as well"
    assert read_tokens(path, 1) == LedgerTokens(6, thrown)
    assert read_tokens(path, 2) == LedgerTokens(6, {}), "the row of step 2 has them"
    # No close: the process was killed.
    ledger = reopened(path)
    assert (ledger.thrown(2), ledger.thrown(1)) == (thrown, {})
    ledger.drop(4, "temperature", 2)
    assert ledger.thrown(2) == {**thrown, "dropped": 6}
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE thrown")
    assert read_tokens(path, 1) == LedgerTokens(3, {})
    assert reopened(path).thrown(2) == {}


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


def test_prompts_of_another_recipe_are_issued_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Though the first who tries is killed; a later checkpoint's prompts are of the new recipe."""
    before, other = tmp_path / "before", replace(RUN, branch="branch_2")
    ledger = reopened(path)
    fill(ledger, answered(0), answered(1), group(2))
    ship(ledger, 1, 0)
    before.write_bytes(ledger.snapshot())
    with monkeypatch.context() as context:
        context.setattr(opening, "write_owner", killed)
        with pytest.raises(KeyboardInterrupt):
            Ledger(path, other, before, 1, again="recipe")
    ledger = Ledger(path, other, before, 1, again="recipe")
    assert ledger.waiting() == []
    assert ledger.never_issued() == ([], 1)
    ledger.issue(group(1))
    after = tmp_path / "after"
    after.write_bytes(ledger.snapshot())
    ledger.close()
    content = read_ledger(path)
    assert [(row["place"], row["try"], row["reason"], row["step"]) for row in content.dropped] == [
        (1, 1, "recipe", 2),
        (2, 1, "recipe", 2),
    ]
    assert content.samples == []
    path.unlink()
    assert Ledger(path, other, after, 1, again="recipe").waiting() == [group(1)]


def killed(*_: object) -> None:
    raise KeyboardInterrupt


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


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_a_ledger_of_another_format_is_not_touched(path: Path, tmp_path: Path, other: int):
    """Its rows may mean something else: a run doesn't resume from it, and readers name its format."""
    with contextlib.closing(reopened(path)) as ledger:
        fill(ledger, answered(1))
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE run SET format = {other}")
    snapshot = path.rename(tmp_path / "checkpoint")
    before = snapshot.read_bytes()
    reason = f"has format {other}; this version of Cairn reads format {FORMAT}"
    with pytest.raises(CheckpointError, match=reason):
        reopened(path, snapshot, 1)
    with pytest.raises(CheckpointError, match=reason):
        read_ledger(snapshot, immutable=True)
    assert snapshot.read_bytes() == before


SPANS = ("run:branch_1:0", "run:branch_1:1")
TOKEN = st.tuples(st.integers(0, 2**31 - 1), st.floats(-9999, 0, width=32))
TOKENS = st.lists(TOKEN, min_size=1, max_size=4)
PIECE = st.tuples(st.integers(0, 1), TOKENS, st.integers(0, 4), st.booleans())


@given(st.lists(PIECE, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_answers_grow_by_pieces_that_never_change(
    pieces: list[tuple[int, list[tuple[int, float]], int, bool]], cut: bool
):
    """Whenever the process is killed, each is there as it was; what is written once is not written again."""
    with tempfile.TemporaryDirectory() as folder:
        path, before = Path(folder, "ledger.sqlite"), set[Any]()
        ledger, group = reopened(path), program(0)
        fill(ledger, group)
        for sample, tokens, split, killed in pieces:
            ids, logprobs = map(list, zip(*tokens, strict=True))
            middle = min(split, len(ids))
            spans = [VersionSpan(SPANS[0], 0, middle), VersionSpan(SPANS[1], middle, len(ids))]
            spans = [span for span in spans if span.start < span.end]
            rollout = group.rollouts[sample]
            rollout.extend(Generation(ids, logprobs, spans, "length"), asked=len(ids), longest=100)
            ledger.record(0, {sample: rollout})
            after = set(sqlite3.connect(path).execute("SELECT * FROM pieces"))
            assert before < after
            before = after
            if killed:
                ledger = reopened(path)
                assert ledger.waiting() == [group]
                (group,) = ledger.waiting()
        if cut and len(group.rollouts[0].token_ids) > 1:
            group.rollouts[0].cut(1)
            ledger.record(0, {0: group.rollouts[0]})
        assert reopened(path).waiting() == [group]
        assert not list(path.parent.glob("*aside*"))


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM pieces WHERE start = 0 AND number = 0",
        "DELETE FROM pieces WHERE start = 3 AND number = 0",
        "DELETE FROM pieces WHERE number = -1 AND sample = 0",
        "UPDATE pieces SET start = start + 1 WHERE number = 0",
        "UPDATE pieces SET logprobs = X'' WHERE number = 0",
        "UPDATE pieces SET token_ids = X'000000', logprobs = X'000000' WHERE number = 0",
        "UPDATE pieces SET versions = 'no JSON' WHERE number = -1",
        "UPDATE pieces SET number = 7 WHERE number = 0",
        "UPDATE pieces SET place = 9 WHERE number = -1",
    ],
)
def test_a_ledger_that_has_lost_pieces_is_not_gone_on_with(path: Path, damage: str):
    """Or whose pieces are no longer what was written."""
    ledger = reopened(path)
    fill(ledger, answered(0), program(1))
    one = turn(0, end=None)
    ledger.record_turn(1, 0, one)
    one.extend(Generation([1], [-1.0], [VersionSpan(SPANS[0], 0, 1)], "stop"), asked=1, longest=9)
    ledger.record_turn(1, 0, one)
    ledger.close()
    assert reopened(path).calls(1, 0) == [one]
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(damage)
    assert reopened(path).waiting() == []
    assert list(path.parent.glob("*aside*"))


# Rollouts that are programs


def turn(number: int, branch: int = 0, kept: int = 0, end: str | None = "stop") -> Turn:
    """An answer of three tokens of two policies."""
    spans = [("run:branch_1:0", 0, 1), ("run:branch_1:1", 1, 3)]
    tokens, logprobs = array("i", [7, 8, 70_000]), array("f", [-0.25, -1 / 3, 0.0])
    return Turn(number, f"request {number}", branch, kept, array("i", [1, 2]), tokens, logprobs, spans, end)


def program(place: int) -> AnswerGroup:
    """A prompt whose two answers are programs that have begun."""
    return AnswerGroup(place, 10 + place, 0, [], [Rollout(5), Rollout(6)])


def test_the_calls_of_a_program_are_there_again(path: Path):
    """In order, exactly as they were answered, and with each the next process starts where this one ended."""
    ledger = reopened(path)
    fill(ledger, program(0), program(1))
    ledger.record_turn(0, 1, turn(0, end=None))
    ledger.record_turn(0, 1, turn(0))
    ledger.record_call(0, 1, Call(1, "tool", '{"a": 1}'))
    ledger.record_turn(0, 1, turn(2, kept=5, end=None))
    ledger.record_turn(1, 1, turn(0))
    again = reopened(path)
    assert again.calls(0, 1) == [turn(0), Call(1, "tool", '{"a": 1}'), turn(2, kept=5, end=None)]
    assert again.calls(0, 0) == []
    first, second = again.waiting()
    assert [rollout.turns for rollout in first.rollouts + second.rollouts] == [[]] * 4
    assert first.rollouts[1].versions == [
        ("run:branch_1:0", 0, 1),
        ("run:branch_1:1", 1, 3),
        ("run:branch_1:0", 3, 4),
        ("run:branch_1:1", 4, 6),
    ]
    assert (first.whole, first.oldest_step, second.versions) == (
        False,
        0,
        {"run:branch_1:0", "run:branch_1:1"},
    )


def test_a_program_that_ended_waits_whole(path: Path):
    """With its reward, of which parts, and its turns, of which a batch is made; or with why it failed."""
    ledger = reopened(path)
    fill(ledger, program(0))
    (group,) = ledger.waiting()
    for sample, rollout in enumerate(group.rollouts):
        ledger.record_turn(0, sample, turn(0))
        ledger.record_turn(0, sample, turn(1, branch=1))
        rollout.take(ledger.turns(0, sample))
    done, gone = group.rollouts
    done.finish_reason, done.text, done.reward, done.parts = (
        "stop",
        "gh",
        0.75,
        {"right": 1.0, "short": -0.25},
    )
    gone.failed, gone.diverged = "raised", 2
    ledger.finish(0, 0, done, 2)
    ledger.finish(0, 1, gone, 2)
    assert reopened(path).waiting() == [group]
    assert group.whole
    assert (done.token_ids.tolist(), [turn.branch for turn in done.turns]) == ([7, 8, 70_000] * 2, [0, 1])
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM turns WHERE sample = 0 AND number = 1")
    ledger.close()
    assert reopened(path).waiting() == []
    assert list(
        path.parent.glob("ledger_aside_1.sqlite")
    )  # what was learned from it could not be told any more


def test_calls_that_a_program_no_longer_makes_are_forgotten(path: Path):
    ledger = reopened(path)
    fill(ledger, program(0))
    (group,) = ledger.waiting()
    ledger.record_turn(0, 0, turn(0))
    ledger.record_call(0, 0, Call(1, "tool", "1"))
    group.rollouts[0].diverged += 1
    ledger.forget_calls(0, 0, [1], group.rollouts[0])
    assert ledger.calls(0, 0) == [turn(0)]
    assert [rollout.diverged for rollout in reopened(path).waiting()[0].rollouts] == [1, 0]


def test_a_prompt_that_was_given_up_is_issued_no_more(path: Path, tmp_path: Path):
    """Nothing but a row of it stays; a run that goes back to before it tries it again."""
    ledger = reopened(path)
    fill(ledger, answered(0), program(1))
    ledger.record_turn(1, 0, turn(0))
    ledger.fail(ledger.waiting()[1], "the sandbox died", 2)
    ship(ledger, 1, 0)
    assert ledger.never_issued() == ([], 2)
    assert ledger.calls(1, 0) == []
    (row,) = read_ledger(path).failed
    assert row == {"place": 1, "problem": 11, "step": 2, "reason": "the sandbox died", "environment": 0}
    snapshot = tmp_path / "snapshot"
    snapshot.write_bytes(ledger.snapshot())
    assert reopened(tmp_path / "again.sqlite", snapshot, 2).never_issued() == ([], 2)
    assert reopened(tmp_path / "before.sqlite", snapshot, 1).never_issued() == ([], 1)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_what_they_were_made_from(places: set[int]):
    ranges = to_ranges(places)
    assert [place for first, last in ranges for place in range(first, last + 1)] == sorted(places)
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(ranges))
