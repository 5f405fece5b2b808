"""`ckpt audit`: finds each kind of broken promise, and reports none in a sound run."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.config.trainer import SFTConfig, SFTDataConfig
from cairn.launch import main
from cairn.orchestrator.ledger import FORMAT, RESTS, SCHEMA
from cairn.orchestrator.prompt_order import Order, Portion
from cairn.run.batches import FROM_TEXT, RLBatch, Sample, batch_path, write_batch
from cairn.run.errors import UsageError
from cairn.run.messages import BatchHeader, ShippedBatch
from cairn.run.metrics import CHAIN, chained
from cairn.run.seeds import permutation
from cairn.tools.audit import Report, audit
from cairn.trainer.data.batches import SFTData

MODEL = Path(__file__).resolve().parents[2] / "configs/reverse_text/model"
RUN, BRANCH, SEED = "0badcafe", "branch_1", 7
PROBLEMS, EACH, SAMPLES, TOKENS = 10, 4, 2, 24  # prompts in an epoch, in a batch; answers; tokens in a batch
LAST, SAVED, LAG = 6, (2, 4), 1  # steps trained, steps saved, and the bound on staleness

COLUMNS = "place, sample, seed, finish_reason, text, reward, tokens"


def problem_at(place: int) -> int:
    """The problem that the run's order has at a place."""
    epoch, index = divmod(place, PROBLEMS)
    return permutation(PROBLEMS, SEED, "prompt order", epoch)[index]


class Run:
    """The directory of an RL or SFT run of 6 steps and 7 shipped batches, which tests then damage."""

    def __init__(self, path: Path, command: str = "rl"):
        self.path = path
        self.command = command
        self._statements: list[str] | None = None
        self.rows = [self._row(step) for step in range(1, LAST + 1)]
        path.mkdir(parents=True)
        self.write("config.json", {"ckpt": None, "data": {"batch_size": EACH * SAMPLES}})
        attempt = {"run_id": RUN, "number": 1, "command": command, "start_step": 0, "resume_from": None}
        self.write("roles.json", {**attempt, "branch": BRANCH, "roles": {}})
        for step, parent in zip(SAVED, [None, *SAVED], strict=False):
            self.save(step, {"run_id": RUN, "step": parent} if parent else None)
        self.write_metrics()
        if command == "rl":
            self._make_ledger()

    def _row(self, step: int) -> dict:
        total = step * EACH * SAMPLES
        shared = {"step": step, "loss": 1 / step, "total_samples": total, "total_tokens": step * TOKENS}
        of_kind = {"batch/digest": f"digest {step}"} if self.command == "rl" else {"epoch": total / 100}
        return {**shared, **of_kind}

    def write(self, name: str, content: object) -> None:
        """Read a JSON file."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(json.dumps(content))

    def write_metrics(self) -> None:
        """The current rows of metrics.jsonl."""
        (self.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def save(self, step: int, parent: dict | None, **changes: object) -> None:
        """Write a checkpoint."""
        row = self._row(step)
        folder = f"checkpoints/step_{step}"
        progress = {"step": step, "total_tokens": row["total_tokens"], "total_samples": row["total_samples"]}
        state = {"progress": progress, "config": {"data": {"batch_size": EACH * SAMPLES}}}
        self.write(f"{folder}/trainer/state.json", state | {"data": {"records": 100}})
        fields = {
            **{"step": step, "run_id": RUN, "attempt": 1, "branch": BRANCH, "parent": parent},
            **{"created": "", "parts": ["trainer"], "world_size": 1, "dtypes": {}, "versions": {}},
            **{"metrics": {"loss": row["loss"]}, "config_digest": "", "files": {}},
        }
        manifest = Manifest(**fields | changes)
        (self.path / folder / "manifest.json").write_bytes(manifest.to_json())

    def _make_ledger(self) -> None:
        """Ship batches 1 to 7, of which 1 to 4 are covered by a checkpoint; two more prompts wait."""
        self._statements = [SCHEMA]
        sizes = f"{FORMAT}, {SEED}, {PROBLEMS}, {EACH}, {SAMPLES}, {LAG}"
        self.sql(f"INSERT INTO run VALUES ('{RUN}', '{BRANCH}', {sizes})")
        self.sql("INSERT INTO environments SELECT 0, 'only', problems, 1.0, samples_per_prompt FROM run")
        for step in range(1, LAST + 2):
            places = json.dumps([[(step - 1) * EACH, step * EACH - 1]])
            oldest = max(step - 1 - LAG, 0)
            values = f"{step}, '{places}', {EACH * SAMPLES}, {TOKENS}, 'digest {step}', {oldest}"
            self.sql(f"INSERT INTO batches VALUES ({values})")
        for place in range(4 * EACH, 7 * EACH + 2):
            self.ask(place, batch=place // EACH + 1 if place < 7 * EACH else None)
        self.sql("INSERT INTO dropped VALUES (3, 1, 'stale', 1), (11, 1, 'stale', 3), (11, 2, 'lost', 3)")
        whole = ";\n".join(["BEGIN", *self._statements, "COMMIT"])  # each by itself is synced to the disk
        self._statements = None
        self.sql(whole)

    def ask(self, place: int, batch: int | None) -> None:
        """A prompt with its answers; without a batch, the second answer is not finished."""
        values = f"{place}, {problem_at(place)}, 1, 0, {batch or 'NULL'}, '[1]', 0"
        self.sql(f"INSERT INTO groups VALUES ({values})")
        version = f"{RUN}:{BRANCH}:{place // EACH}"
        for sample in range(SAMPLES):
            end = "'stop', 'ab', 0.5, 2" if batch is not None or sample == 0 else "NULL, '', NULL, NULL"
            self.sql(f"INSERT INTO samples ({COLUMNS}) VALUES ({place}, {sample}, 1, {end})")
            self.sampled(place, sample, -1, version)

    def sampled(self, place: int, sample: int, number: int, version: str) -> None:
        """Two tokens of an answer, or of one of its turns: 5 and 6, in a piece each."""
        spans = json.dumps([[version, 0, 1]])
        for start in range(2):
            values = f"{place}, {sample}, {number}, {start}, X'0{5 + start}000000', X'000080BF', '{spans}'"
            self.sql(f"INSERT INTO pieces VALUES ({values})")

    def sql(self, statement: str) -> None:
        """Change the ledger, or note a statement of those that make it."""
        if self._statements is not None:
            self._statements.append(statement)
            return
        with contextlib.closing(sqlite3.connect(self.path / "ledger.sqlite")) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(statement)

    def audit(self) -> Report:
        """Run the audit."""
        return audit(self.path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A sound RL run."""
    return Run(tmp_path / "run")


@pytest.fixture
def sft(tmp_path: Path) -> Run:
    """A sound SFT run."""
    return Run(tmp_path / "sft", "sft")


def kinds(report: Report) -> set[str]:
    """The kinds of promises that were broken."""
    return {violation.kind for violation in report.violations}


def test_a_run_in_good_order(run: Run):
    """28 prompts were shipped, of which 24 were trained on, over more than two epochs; two more wait."""
    report = run.audit()
    assert report.violations == report.notes == []
    assert (report.first_step, report.last_step, report.checkpoints) == (1, 6, [2, 4])
    assert (report.staleness, report.max_off_policy_steps) == (1, 1)
    counts = [(e.epoch, e.issued, e.trained, e.waiting, e.repeated, e.missing) for e in report.epochs]
    assert counts == [(0, 10, 10, 0, 0, 0), (1, 10, 10, 0, 0, 0), (2, 10, 4, 6, 0, 0)]
    assert [epoch.dropped for epoch in report.epochs] == [{"stale": 1}, {"stale": 1, "lost": 1}, {}]


def test_the_audit_leaves_the_run_as_it_was(run: Run):
    """The files of a folder, and their content."""

    def state() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}

    with contextlib.closing(sqlite3.connect(run.path / "ledger.sqlite")) as writer:  # a run at work
        writer.execute("INSERT INTO dropped VALUES (0, 1, 'stale', 1)")
        before = state()
        assert run.audit().epochs[0].dropped == {"stale": 1}, "what is not committed is not seen"
        assert {k: v for k, v in state().items() if not k.name.endswith("-shm")} == {
            k: v for k, v in before.items() if not k.name.endswith("-shm")
        }


def test_a_crash_may_cut_the_last_row_short(run: Run):
    """A step without a row in metrics.jsonl is trained again; until then its prompts wait."""
    path = run.path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    report = run.audit()
    assert report.ok
    assert (report.last_step, report.epochs[2].waiting) == (5, 10)


# Each damage, and the kind of violation that it causes

DOCTORED: dict[str, tuple[str, Callable[[Run], object]]] = {
    "a prompt in two batches": (
        "repeated",
        lambda run: run.sql("UPDATE batches SET places = '[[12, 15], [3, 3]]' WHERE step = 4"),
    ),
    "a prompt that waits although it was shipped": (
        "repeated",
        lambda run: run.sql("UPDATE groups SET batch = NULL WHERE place = 20"),
    ),
    "a hole among the trained prompts": (
        "missing",
        lambda run: run.sql("UPDATE batches SET places = '[[4, 5], [7, 7]]' WHERE step = 2"),
    ),
    "a prompt that was issued and lost": (
        "missing",
        lambda run: run.sql("DELETE FROM groups WHERE place = 28"),
    ),
    "another batch than was shipped": (
        "batch",
        lambda run: run.rows[2].update({"batch/digest": "another"}),
    ),
    "a step without a digest": ("batch", lambda run: run.rows[2].pop("batch/digest")),
    "a step that nothing was shipped for": (
        "batch",
        lambda run: run.sql("DELETE FROM batches WHERE step = 3"),
    ),
    "a sample that was left out": (
        "batch",
        lambda run: run.sql("UPDATE batches SET samples = 9 WHERE step = 3"),
    ),
    "a token that was left out": (
        "batch",
        lambda run: run.sql("UPDATE batches SET tokens = 25 WHERE step = 3"),
    ),
    "a prompt that its batch lacks": (
        "batch",
        lambda run: run.sql("UPDATE groups SET batch = 6 WHERE place = 18"),
    ),
    "a step twice": ("metrics", lambda run: run.rows.insert(3, run.rows[2])),
    "a step left out": ("metrics", lambda run: run.rows.pop(2)),
    "steps out of order": ("metrics", lambda run: run.rows.append(run.rows.pop(4))),
    "no first step": ("metrics", lambda run: run.rows.pop(0)),
    "a checkpoint that no row tells of": ("metrics", lambda run: run.rows.__delitem__(slice(3, None))),
    "a row that is none": ("metrics", lambda run: run.rows.insert(3, {"loss": 0.5})),
    "a stale batch": ("stale", lambda run: run.sql("UPDATE batches SET oldest_step = 2 WHERE step = 5")),
    "a batch from the future": (
        "stale",
        lambda run: run.sql("UPDATE batches SET oldest_step = 5 WHERE step = 5"),
    ),
    "a token of a policy that was still to come": (
        "version",
        lambda run: run.sql(
            f"""UPDATE pieces SET versions = '[["{RUN}:{BRANCH}:6", 0, 1]]' WHERE place = 17"""
        ),
    ),
    "a token of a policy that no batch has made": (
        "version",
        lambda run: run.sql(
            f"""UPDATE pieces SET versions = '[["{RUN}:{BRANCH}:8", 0, 1]]' WHERE place = 28"""
        ),
    ),
    "a token of unknown weights": (
        "version",
        lambda run: run.sql("""UPDATE pieces SET versions = '[["default", 0, 1]]' WHERE place = 17"""),
    ),
    "another problem than the order says": (
        "order",
        lambda run: run.sql("UPDATE groups SET problem = (problem + 1) % 10 WHERE place = 25"),
    ),
    "an unfinished answer in a batch": (
        "sample",
        lambda run: run.sql("UPDATE samples SET finish_reason = NULL WHERE place = 19 AND sample = 1"),
    ),
    "an answer without a reward": (
        "sample",
        lambda run: run.sql("UPDATE samples SET reward = NULL WHERE place = 19"),
    ),
    "a token without a logprob": (
        "sample",
        lambda run: run.sql("UPDATE pieces SET logprobs = X'' WHERE place = 19 AND start = 1"),
    ),
    "a piece too few": ("sample", lambda run: run.sql("DELETE FROM pieces WHERE place = 19 AND start = 1")),
    "an answer too few": (
        "sample",
        lambda run: run.sql("DELETE FROM samples WHERE place = 19 AND sample = 0"),
    ),
    "a ledger of another branch": ("ledger", lambda run: run.sql("UPDATE run SET branch = 'branch_9'")),
    "a checkpoint that goes on from nothing": ("lineage", lambda run: run.save(4, None)),
    "a checkpoint that leaves one out": ("lineage", lambda run: run.save(4, {"run_id": RUN, "step": 1})),
    "a checkpoint of its own future": ("lineage", lambda run: run.save(4, {"run_id": RUN, "step": 4})),
    "a checkpoint of another run": ("lineage", lambda run: run.save(4, None, run_id="1badcafe")),
    "a checkpoint that says something else": (
        "manifest",
        lambda run: run.save(4, {"run_id": RUN, "step": 2}, metrics={"loss": 0.3}),
    ),
    "a manifest that is none": (
        "manifest",
        lambda run: (run.path / "checkpoints/step_4/manifest.json").write_text("{}"),
    ),
    "a checkpoint that has come less far": (
        "progress",
        lambda run: run.write("checkpoints/step_4/trainer/state.json", {"progress": {"step": 3}}),
    ),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_a_broken_promise_is_found(what: str, run: Run):
    """The violation is distinguished from others, with the rows that show it."""
    kind, doctor = DOCTORED[what]
    doctor(run)
    run.write_metrics()
    report = run.audit()
    assert not report.ok
    assert kind in kinds(report), report.violations
    assert all(violation.rows for violation in report.violations if violation.kind == kind)


def test_counts_say_how_many_prompts_are_concerned(run: Run):
    """One prompt twice in the first epoch, one lost in the second."""
    run.sql("UPDATE batches SET places = '[[12, 12], [14, 15], [3, 3]]' WHERE step = 4")
    report = run.audit()
    assert [(epoch.repeated, epoch.missing) for epoch in report.epochs] == [(1, 0), (0, 1), (0, 0)]
    assert [epoch.issued for epoch in report.epochs] == [10, 9, 10]
    rows = [violation.rows for violation in report.violations]
    assert rows == [[[3, 3]], [[13, 13]]]


def test_batches_need_not_be_contiguous(run: Run):
    """Asynchronous runs ship finished prompts; unfinished ones wait."""
    run.sql("UPDATE batches SET places = '[[0, 2], [4, 4]]' WHERE step = 1")
    run.sql("UPDATE batches SET places = '[[3, 3], [5, 7]]' WHERE step = 2")
    assert run.audit().ok
    run.sql("UPDATE batches SET places = '[[24, 26], [29, 29]]' WHERE step = 7")
    run.sql("UPDATE groups SET batch = NULL WHERE place = 27")
    run.sql("UPDATE groups SET batch = 7 WHERE place = 29")
    run.sql("UPDATE samples SET reward = 1, finish_reason = 'stop' WHERE place = 29")
    run.sql("UPDATE pieces SET versions = replace(versions, ':7', ':6')")
    assert run.audit().violations == []


def test_answers_of_another_branch_are_as_old_as_both_branches_steps(run: Run):
    """From the step on from which both have started; the ledger says which prompts have such."""
    of_16 = "UPDATE pieces SET versions = replace(versions, '{}', '{}') WHERE place = 16"
    run.sql(of_16.format(f"{RUN}:{BRANCH}:4", "other:branch_7:5"))
    assert kinds(run.audit()) == {"version"}, "batch 5 is made before there is a policy 5"
    run.sql("CREATE TABLE shared (place INTEGER PRIMARY KEY, branch TEXT, since INTEGER)")
    run.sql("INSERT INTO shared VALUES (16, 'high', 4)")
    report = run.audit()
    assert report.ok, report.violations
    assert "1 prompt took the answers that branch high had sampled" in report.notes
    run.sql(of_16.format("other:branch_7:5", "other:branch_7:6"))
    assert kinds(run.audit()) == {"version"}, "two steps since the start are one too many"
    run.sql(of_16.format("other:branch_7:6", "other:branch_7:5"))
    run.sql("UPDATE batches SET oldest_step = -1 WHERE step = 1")
    assert kinds(run.audit()) == {"stale"}, "it has no answer of another branch"
    run.sql("UPDATE batches SET oldest_step = 0 WHERE step = 1")
    run.sql("INSERT INTO shared VALUES (0, 'high', 0)")
    assert run.audit().ok


def test_a_batch_that_is_not_noted_yet_was_shipped(run: Run):
    """The file is written first: the trainer may train on it, or the orchestrator die, before the note is."""
    run.sql(
        "DELETE FROM batches WHERE step = 6 OR step = 7; UPDATE groups SET batch = NULL WHERE place >= 20"
    )
    assert {"batch", "version"} <= kinds(run.audit())
    row = ShippedBatch(6, [[20, 23]], EACH * SAMPLES, TOKENS, "digest 6", oldest_step=4)
    header = BatchHeader(RUN, BRANCH, f"{RUN}:1", 6, f"{RUN}:{BRANCH}:5", [0, 1, 2, 3], row)
    sample = Sample.of_answer([], [1], logprobs=0.0, advantages=0.0)
    write_batch(batch_path(run.path / "batches", 6), RLBatch([sample], {}, sampling=FROM_TEXT, header=header))
    run.sql("DELETE FROM samples WHERE place >= 28")  # of policies that do not exist now
    assert run.audit().violations == []


def test_a_dropped_prompt_waits_to_be_issued_again(run: Run):
    """A dropped prompt is no gap, and one that was issued again is counted once."""
    run.sql("DELETE FROM groups WHERE place = 28; INSERT INTO dropped VALUES (28, 1, 'stale', 8)")
    report = run.audit()
    assert report.violations == []
    assert (report.epochs[2].issued, report.epochs[2].waiting) == (10, 6)


def test_a_prompt_of_which_only_the_batch_is_left(run: Run):
    """A power cut may remove rows of the ledger; the batch's file restores some of them."""
    run.sql("UPDATE groups SET prompt_ids = NULL WHERE place = 21; DELETE FROM samples WHERE place = 21")
    assert run.audit().violations == []


def test_cut_samples_have_fewer_tokens(run: Run):
    """The trainer cuts samples that are longer than its rows, and says so in the metrics."""
    for row in run.rows[2:]:
        row["total_tokens"] -= 3
    run.rows[2]["cut_samples"] = 1
    (run.path / "checkpoints/step_4/trainer/state.json").unlink()
    run.write_metrics()
    assert run.audit().ok


def test_retention_may_have_deleted_a_parent(run: Run):
    """With a retention rule that deletes it, this is expected; without one it is a note."""
    (run.path / "checkpoints/step_2/manifest.json").unlink()
    report = run.audit()
    assert report.ok
    assert "step 4 continues from step 2, which does not exist" in report.notes[0]
    run.write("config.json", {"ckpt": {"keep_last": 1}})
    assert run.audit().notes == []


def test_a_fork_begins_where_the_other_run_was(run: Run):
    """Its metrics begin later, if its first checkpoint or its start says so."""
    run.rows = run.rows[2:]
    run.write_metrics()
    (run.path / "checkpoints/step_2/manifest.json").unlink()
    assert kinds(run.audit()) == {"metrics"}
    run.save(4, {"run_id": "another", "step": 2})
    assert run.audit().ok


def test_a_snapshot_says_what_the_ledger_says(run: Run):
    """The copy must agree on the batches up to its step; opening it creates no file in the checkpoint."""
    folder = run.path / "checkpoints/step_4"
    files = {"orchestrator/ledger.sqlite": {"size": 0, "crc64nvme": []}}
    run.save(4, {"run_id": RUN, "step": 2}, files=files)
    (folder / "orchestrator").mkdir()
    with contextlib.closing(sqlite3.connect(run.path / "ledger.sqlite")) as database:
        (folder / "orchestrator" / "ledger.sqlite").write_bytes(database.serialize())
    assert run.audit().ok
    assert [path.name for path in (folder / "orchestrator").iterdir()] == ["ledger.sqlite"]
    run.sql("UPDATE batches SET places = '[[12, 13], [14, 15]]' WHERE step = 4")
    assert kinds(run.audit()) == {"snapshot"}
    (folder / "orchestrator" / "ledger.sqlite").write_bytes(b"nothing")
    assert kinds(run.audit()) == {"snapshot"}


@pytest.mark.parametrize("damage", ["removed", "garbage", "empty", "behind"])
def test_a_complete_run_is_proved_by_the_newest_copy_of_a_ledger_that_a_power_cut_damaged(
    run: Run, damage: str
):
    """A complete run is not resumed, so nothing replaces its ledger. Rows lost inside it are a violation."""
    path, folder = run.path / "ledger.sqlite", run.path / f"checkpoints/step_{LAST}"
    files = {"orchestrator/ledger.sqlite": {"size": 0, "crc64nvme": []}}
    run.save(LAST, {"run_id": RUN, "step": SAVED[-1]}, files=files)
    (folder / "orchestrator").mkdir()
    with contextlib.closing(sqlite3.connect(path)) as database:
        copy = folder / "orchestrator" / "ledger.sqlite"
        copy.write_bytes(database.serialize())
    if damage == "behind":
        run.sql("DELETE FROM batches WHERE step > 2")
    else:
        for leftover in run.path.glob("ledger.sqlite-*"):
            leftover.unlink()
        path.unlink()
        if damage != "removed":
            path.write_bytes(b"x" * 5000 if damage == "garbage" else b"")
    report = run.audit()
    assert report.violations == []
    assert [note for note in report.notes if f"the copy in checkpoint {LAST} was audited instead" in note]
    path.write_bytes(copy.read_bytes())
    run.sql("DELETE FROM batches WHERE step = 2")
    assert {"batch", "snapshot"} <= kinds(run.audit())


# Programs and failures


def program(run: Run, place: int = 20) -> None:
    """Make the answers to a shipped prompt those of programs of two turns and a call."""
    run.sql(f"UPDATE samples SET tokens = NULL, calls = 3 WHERE place = {place}")
    run.sql(f"DELETE FROM pieces WHERE place = {place}")
    for sample in range(SAMPLES):
        for number, kept in ((0, 0), (2, 3)):
            values = f"{place}, {sample}, {number}, 'digest', 0, {kept}, X'01000000', 'stop', 2"
            run.sql(f"INSERT INTO turns VALUES ({values})")
            run.sampled(place, sample, number, f"{RUN}:{BRANCH}:{place // EACH}")
        run.sql(f"INSERT INTO calls VALUES ({place}, {sample}, 1, 'tool', '1')")


def test_programs_in_good_order(run: Run):
    program(run)
    assert run.audit().violations == []


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE turns SET kept = 2 WHERE number = 2 AND sample = 1",
        "UPDATE turns SET branch = 1 WHERE number = 2 AND sample = 1",
        "DELETE FROM turns WHERE number = 0 AND sample = 1",
        "DELETE FROM calls WHERE sample = 0",
        "UPDATE pieces SET token_ids = X'' WHERE number = 2 AND start = 1",
        "DELETE FROM pieces WHERE number = 2 AND start = 1",
        "UPDATE turns SET finish_reason = NULL WHERE number = 2",
        "UPDATE turns SET sample = 7 WHERE sample = 1",
    ],
)
def test_a_turn_that_is_lost_or_altered_is_found(run: Run, damage: str):
    program(run)
    run.sql(damage)
    assert "turn" in kinds(run.audit())


def test_what_a_batch_teaches_is_what_was_sampled(run: Run):
    """Token by token, as long as both are there; samples are prompts, programs one for each branch."""
    program(run)

    def write(tokens: list[int], *masked: list[int]) -> None:
        samples = []
        for place in range(5 * EACH, 6 * EACH):
            for number in range(SAMPLES):
                answers = [1, 5, 6, 1, 5, 6] if place == 20 else [1, *tokens]
                mask = np.array([token != 1 for token in answers])
                columns = {name: np.zeros(len(answers), np.float32) for name in ("logprobs", "advantages")}
                sample = Sample(np.array(answers, np.int32), mask, columns)
                samples.append(sample.unlearned() if [place, number] in masked else sample)
        row = ShippedBatch(6, [[5 * EACH, 6 * EACH - 1]], EACH * SAMPLES, TOKENS, "digest 6", 4)
        header = BatchHeader(RUN, BRANCH, "", 6, "", [0] * EACH, row)
        write_batch(batch_path(run.path / "batches", 6), RLBatch(samples, sampling=FROM_TEXT, header=header))

    write([5, 6])
    assert run.audit().violations == []
    write([5, 6], [21, 1])
    run.sql("UPDATE samples SET finish_reason = 'length' WHERE place = 21 AND sample = 1")
    (broken,) = run.audit().violations
    assert broken.what.startswith("batch 6, prompt 21, answer 1: teaches 0 tokens, which are not the 2")
    run.write("recipe.json", {"orchestrator": {"settings": {"overlong.type": "mask"}}})
    assert run.audit().violations == []
    write([5, 6], [21, 0])
    assert kinds(run.audit()) == {"turn"}  # it was not cut off
    write([5, 7])
    assert kinds(run.audit()) == {"turn"}
    run.sql("UPDATE groups SET prompt_ids = NULL WHERE place = 21; DELETE FROM samples WHERE place = 21")
    assert run.audit().ok  # too little is left to tell


def test_answers_that_failed_are_left_out_and_prompts_are_given_up(run: Run):
    """A batch needs two answers to a prompt; what was given up is neither missing nor waiting."""
    run.sql("UPDATE run SET samples_per_prompt = 3")
    for place in range(4 * EACH, 7 * EACH):
        values = f"{place}, 2, 1, NULL, '', NULL, NULL, 'the judge is ill'"
        run.sql(f"INSERT INTO samples ({COLUMNS}, failed) VALUES ({values})")
    last = 7 * EACH + 1
    run.sql(f"DELETE FROM groups WHERE place = {last}; DELETE FROM samples WHERE place = {last}")
    run.sql(f"INSERT INTO failed VALUES ({last}, {problem_at(last)}, 7, 'the judge is ill', 0)")
    report = run.audit()
    assert report.violations == []
    assert (report.failed_answers, report.epochs[-1].failed, report.epochs[-1].waiting) == (12, 1, 5)
    run.sql("UPDATE samples SET failed = 'so is the other', reward = NULL WHERE place = 20 AND sample = 1")
    assert kinds(run.audit()) == {"sample"}
    run.sql("INSERT INTO failed VALUES (20, 0, 7, 'and shipped', 0)")
    assert "repeated" in kinds(run.audit())


def rest(run: Run, place: int, problem: int | None = None) -> None:
    """A prompt, one of those that wait, is said to be passed over because its problem rests."""
    number = problem_at(place) if problem is None else problem
    run.sql(f"DELETE FROM groups WHERE place = {place}; DELETE FROM samples WHERE place = {place}")
    run.sql(f"INSERT INTO failed VALUES ({place}, {number}, 8, '{RESTS}', 0)")


def pool(run: Run, mean: float, easy: float = 1.0, *, epochs: int = 1, resumed: bool = False) -> None:
    """The run's pools, and the outcome of the problem that place 28 asks again, when it was asked before."""
    settings = {"easy": easy, "hard": None, "rest": epochs, "window": 1}
    run.write("config.json", {"ckpt": None, "orchestrator": {"pools": settings}})
    before = [place for place in range(28) if problem_at(place) == problem_at(28)][-1]
    step = before // EACH + 1
    values = f"{before}, 0, {problem_at(before)}, {before // PROBLEMS}, {step}, {mean}"
    run.sql(f"INSERT INTO outcomes VALUES ({values})")
    if resumed:
        attempt = json.loads((run.path / "roles.json").read_text())
        run.write("roles.json", attempt | {"number": 2})


def test_a_prompt_is_passed_over_only_if_its_problem_rests(run: Run):
    """The ledger's outcomes and the order of the prompts prove it."""
    pool(run, 1.0)
    rest(run, 28)
    report = run.audit()
    assert report.violations == []
    assert report.notes == []
    assert report.epochs[-1].resting == 1
    run.sql("UPDATE outcomes SET mean = 0.5")
    assert kinds(run.audit()) == {"resting"}
    run.sql("DELETE FROM outcomes")
    assert run.audit().ok, "outcomes that nothing depends on any more are deleted"


@pytest.mark.parametrize(("mean", "easy"), [(0.5, 1.0), (1.0, 2.0)])
def test_other_pools_than_before_a_resume_are_a_note(run: Run, mean: float, easy: float):
    """Settings may change; what they were is not known."""
    pool(run, mean, easy, resumed=True)
    rest(run, 28)
    report = run.audit()
    assert report.violations == []
    (note,) = report.notes
    assert "1 prompts, such as 28, were passed over" in note


def test_a_skipped_prompt_does_not_pass_for_a_resting_one(run: Run):
    """Its problem was never asked, rested too long ago, or is another one."""
    pool(run, 1.0)
    rest(run, 28, (problem_at(28) + 1) % PROBLEMS)
    assert "order" in kinds(run.audit())
    run.sql(f"UPDATE failed SET problem = {problem_at(28)}")
    assert run.audit().ok
    # Place 3 was trained in batch 1: in an epoch before which nothing was asked, nothing rests.
    run.sql("UPDATE batches SET places = '[[0, 2], [29, 29]]' WHERE step = 1")
    run.sql("DELETE FROM groups WHERE place = 29; DELETE FROM samples WHERE place = 29")
    run.sql(f"INSERT INTO failed VALUES (3, {problem_at(3)}, 1, '{RESTS}', 0)")
    (found,) = run.audit().violations
    assert found.kind == "resting"
    assert "which had not been asked before" in found.what


# SFT


def test_an_sft_run_in_good_order(sft: Run):
    """48 of 100 records."""
    report = sft.audit()
    assert report.violations == []
    (epoch,) = report.epochs
    assert (epoch.problems, epoch.issued, epoch.trained) == (100, 48, 48)


@pytest.mark.parametrize(
    "doctor",
    [
        lambda rows: [row.update(total_samples=row["total_samples"] + 1) for row in rows[2:]],
        lambda rows: [row.update(epoch=row["epoch"] + 0.01) for row in rows[2:]],
        lambda rows: rows[2].update(total_tokens=rows[1]["total_tokens"]),
    ],
    ids=["a record was left out", "the position jumped", "nothing was trained on"],
)
def test_a_jump_in_the_data_is_found(sft: Run, doctor: Callable[[list[dict]], object]):
    """Each step continues in the data where the previous one ended."""
    doctor(sft.rows)
    sft.write_metrics()
    assert "position" in kinds(sft.audit())


@pytest.mark.parametrize("accepted", [True, False])
def test_other_data_needs_a_note(sft: Run, accepted: bool):
    """The audit says which steps were trained on which data; each data set has its own epochs."""
    first = {"records": 100, "digest": "aa", "begins_at": 0}
    second = {"records": 20, "digest": "bb", "begins_at": 2 * EACH * SAMPLES}
    note = {"step": 2, "name": "data", "was": first, "now": second, "accepted": True}
    for step, data in ((2, first), (4, second)):
        path = f"checkpoints/step_{step}/trainer/state.json"
        state = json.loads((sft.path / path).read_text())
        recipe = {"settings": {"data.batch_size": EACH * SAMPLES}, "data": data, "tokenizer": "cc"}
        sft.write(path, state | {"recipe": recipe | {"changes": [note] if accepted and step == 4 else []}})
        sft.write("recipe.json", {"trainer": recipe | {"changes": [note] if accepted else []}})
    for row in sft.rows[2:]:
        row["epoch"] = (row["total_samples"] - second["begins_at"]) / 20
    sft.write_metrics()
    report = sft.audit()
    assert kinds(report) == (set() if accepted else {"recipe"})
    segments = [(one.first_step, one.last_step, one.inputs["data"]["digest"]) for one in report.trained_on]
    assert segments == [(1, 2, "aa"), (3, 6, "bb")]
    assert [(epoch.problems, epoch.trained) for epoch in report.epochs] == [(100, 16), (20, 20), (20, 12)]


def test_another_environment_needs_a_note(run: Run):
    """The change is in the orchestrator's part; environments are compared in what was read of both."""

    def save(step: int, messages: dict[str, str], *names: str) -> None:
        environment = {"problems": 10, "messages": messages}
        changes = [{"step": 2, "name": name, "was": 0, "now": 1, "accepted": True} for name in names]
        recipe = {"environment": environment, "changes": changes}
        run.write(f"checkpoints/step_{step}/orchestrator/state.json", {"recipe": recipe})

    save(2, {"1": "aa", "2": "bb"})
    save(4, {"1": "aa"})
    assert run.audit().ok
    save(4, {"1": "aa", "2": "cc"})
    assert kinds(run.audit()) == {"recipe"}
    save(4, {"1": "aa", "2": "cc"}, "optimizer.lr")
    assert kinds(run.audit()) == {"recipe"}
    save(4, {"1": "aa", "2": "cc"}, "environment.args")
    assert run.audit().ok


# Rows, evaluations, settings, identity


def chain(sft: Run) -> None:
    """Rows and checkpoints as the trainer writes them."""
    before = None
    for row in sft.rows:
        row |= {"lr": 0.1, "learned_tokens": 7, "batch/digest": f"{row['step']:016x}"}
        row[CHAIN] = chained(row, before)
        before = row
    for step, parent in zip(SAVED, [None, *SAVED], strict=False):
        metrics = {key: sft.rows[step - 1][key] for key in ("loss", CHAIN)}
        sft.save(step, {"run_id": RUN, "step": parent} if parent else None, metrics=metrics)
    sft.write_metrics()


@pytest.mark.parametrize("column", ["batch/digest", "lr", "learned_tokens", "loss", "total_tokens", "epoch"])
@pytest.mark.parametrize("step", [3, 6])
def test_a_row_of_a_step_without_a_checkpoint_that_was_altered(sft: Run, column: str, step: int):
    """Its own digest tells, also behind the last checkpoint."""
    chain(sft)
    assert sft.audit().ok
    value = sft.rows[step - 1][column]
    sft.rows[step - 1][column] = "0" * 16 if isinstance(value, str) else value + 1
    sft.write_metrics()
    found = [one.what for one in sft.audit().violations if one.kind == "metrics"]
    assert f"the row of step {step}, or the one before it, is not as it was written" in found[0]


def test_rows_that_were_all_written_again_do_not_pass_for_the_ones_of_a_checkpoint(sft: Run):
    """Though each fits the one before it."""
    chain(sft)
    sft.rows[2]["lr"], before = 9.0, None
    for row in sft.rows:
        row[CHAIN] = chained(row, before)
        before = row
    sft.write_metrics()
    assert kinds(sft.audit()) == {"manifest"}


def test_what_is_proved_and_what_not_is_said(sft: Run, run: Run):
    """Rows of earlier versions have no digests; the same batch twice in an epoch is a note."""
    old = sft.audit()
    assert any("6 of 6 rows of metrics.jsonl have no rows/digest" in one for one in old.unproved)
    chain(sft)
    report = sft.audit()
    assert any("up to step 4 also by its checkpoint" in one for one in report.proved)
    assert any("is not compared with the data" in one for one in report.unproved)
    sft.rows[4]["batch/digest"] = sft.rows[3]["batch/digest"]
    sft.rows[4][CHAIN] = chained(sft.rows[4], sft.rows[3])
    sft.rows[5][CHAIN] = chained(sft.rows[5], sft.rows[4])
    sft.write_metrics()
    (note,) = [one for one in sft.audit().notes if "batch/digest" in one]
    assert "steps 4 and 5 of one epoch have the same" in note
    assert "in one batch" in run.audit().proved[0]


@pytest.mark.parametrize("altered", [False, True])
def test_batches_are_made_again_from_the_data(sft: Run, tmp_path: Path, altered: bool):
    """By content: a step that was trained on other records is found, and other data say so."""
    records = tmp_path / "a.jsonl"
    lines = [json.dumps({"prompt": f"{i}", "completion": "abc"}) for i in range(100)]
    records.write_text("\n".join(lines) + "\n")
    source = SFTDataConfig(name=str(records), batch_size=EACH * SAMPLES)
    config = SFTConfig(data=source, seq_len=64)
    data = SFTData(source, AutoTokenizer.from_pretrained(MODEL), 0, 0, row_length=64)
    for row in sft.rows:
        row["batch/digest"] = data.next_batch(row["step"]).digest()
    if altered:
        sft.rows[2]["batch/digest"] = sft.rows[3]["batch/digest"]
    sft.write_metrics()
    (sft.path / "config.json").write_text(config.model_dump_json())
    for step in SAVED:
        shutil.copytree(MODEL, sft.path / f"checkpoints/step_{step}/model")
    report = audit(sft.path, data=True)
    assert kinds(report) == ({"position"} if altered else set())
    assert any("by content" in one for one in report.proved) != altered
    records.write_text("\n".join(lines[1:]) + "\n")
    (why,) = [one for one in audit(sft.path, data=True).unproved if "of the data" in one]
    assert "holds other records by now" in why


def test_lost_evaluations_are_mentioned(sft: Run):
    """Which metrics.jsonl has the numbers of."""
    for step in (2, 4):
        sft.rows[step - 1]["validation/held/loss"] = 1.0
    sft.write_metrics()
    row = {"step": 2, "name": "held", "loss": 1.0}
    (sft.path / "evals.jsonl").write_text(json.dumps(row) + "\n")
    (note,) = [one for one in sft.audit().notes if "evals.jsonl" in one]
    assert "lacks results of 'held' after steps 4, which" in note


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("noted", [True, False])
def test_a_changed_setting_needs_a_record(sft: Run, noted: bool, marked: bool):
    """A violation where the version of Cairn compared all settings; else a note."""
    change = {"step": 2, "name": "distill", "was": None, "now": {"coef": 1.0}, "accepted": False}
    free = {"free": ["model"]} if marked else {}
    for step, settings in ((2, {"distill": None}), (4, {"distill.coef": 1.0})):
        path = f"checkpoints/step_{step}/trainer/state.json"
        state = json.loads((sft.path / path).read_text())
        changes = [change] if noted and step == 4 else []
        recipe = {"settings": {**settings, "data.batch_size": EACH * SAMPLES}, "changes": changes, **free}
        sft.write(path, state | {"recipe": recipe})
        sft.write("recipe.json", {"trainer": recipe})
    report = sft.audit()
    assert kinds(report) == ({"recipe"} if marked and not noted else set())
    assert any("(distill), and no change is recorded" in one for one in report.notes) == (
        not marked and not noted
    )
    assert report.changes == ([change] if noted else [])


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("damage", ["empty", "gone"])
def test_a_run_whose_roles_are_lost_is_audited(tmp_path: Path, kind: str, damage: str):
    """By its newest checkpoint; without one nobody knows whose the files are."""
    made = Run(tmp_path / kind, kind)
    if kind == "rl":
        made.write("config.json", {"ckpt": None, "trainer": {}})
    roles = made.path / "roles.json"
    roles.write_text("") if damage == "empty" else roles.unlink()
    report = made.audit()
    assert (report.command, report.violations) == (kind, [])
    assert "the newest checkpoint says which run this is" in report.notes[0]
    for step in SAVED:
        (made.path / f"checkpoints/step_{step}/manifest.json").unlink()
    with pytest.raises((CheckpointError, UsageError)):
        made.audit()


# What can't be audited


def test_without_a_ledger_nothing_is_proved(run: Run):
    """Nor with a damaged one, or one of another format."""
    path = run.path / "ledger.sqlite"
    run.sql("UPDATE run SET format = 1")
    with pytest.raises(CheckpointError, match=f"format 1; this version of Cairn reads format {FORMAT}"):
        run.audit()
    run.sql(f"UPDATE run SET format = {FORMAT}; DROP TABLE batches")
    with pytest.raises(CheckpointError, match=r"ledger.sqlite: .* of another format: no such table: batches"):
        run.audit()
    for leftover in run.path.glob("ledger.sqlite-*"):
        leftover.unlink()
    path.write_bytes(b"x" * 5000)
    with pytest.raises(CheckpointError, match="damaged"):
        run.audit()
    path.unlink()
    with pytest.raises(CheckpointError, match="there is no ledger"):
        run.audit()


def test_a_folder_that_is_no_run(tmp_path: Path):
    """Is named."""
    with pytest.raises(UsageError, match=f"{tmp_path}: is not a run directory"):
        audit(tmp_path)


# The command


def test_the_command_prints_what_it_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """For people and for programs; exit code 1 on a violation."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["ckpt", "audit", str(run.path), *flags])
        code = main.ckpt()
        return code, capsys.readouterr().out

    code, text = command()
    assert code == 0
    assert "no violation" in text
    assert "steps 1 to 6" in text
    assert "1 lost, 1 stale" in text
    code, text = command("--json")
    assert (code, json.loads(text)["ok"], json.loads(text)["violations"]) == (0, True, [])
    run.sql("DELETE FROM groups WHERE place = 28")
    code, text = command()
    assert code == 1
    assert "missing" in text
    assert "prompts 28 to 28" in text
    code, text = command("--json")
    assert code == 1
    (violation,) = json.loads(text)["violations"]
    assert (violation["kind"], violation["rows"]) == ("missing", [[28, 28]])


def test_the_epochs_of_several_environments_are_told_apart(run: Run):
    """Each has problems and epochs of its own, and a prompt of the wrong one is found."""
    portions = [Portion("a", 6, 1.0, SAMPLES), Portion("b", 9, 2.0, SAMPLES)]
    run.sql("DELETE FROM environments")
    for number, one in enumerate(portions):
        values = f"{number}, '{one.label}', {one.problems}, {one.weight}, {one.samples_per_prompt}"
        run.sql(f"INSERT INTO environments VALUES ({values})")
    order = Order(SEED, portions)
    for place in range(30):
        at = order.at(place)
        values = f"environment = {at.environment}, problem = {at.problem}"
        run.sql(f"UPDATE groups SET {values} WHERE place = {place}")
    report = run.audit()
    assert report.violations == []
    of_a, of_b = ([e for e in report.epochs if e.environment == label] for label in "ab")
    assert [epoch.epoch for epoch in of_a] == list(range(len(of_a)))
    assert {epoch.problems for epoch in of_a} == {6}
    assert {epoch.problems for epoch in of_b} == {9}
    counted = [sum(epoch.issued for epoch in one) for one in (of_a, of_b)]
    wanted = [[order.environment(place) for place in range(30)].count(number) for number in (0, 1)]
    assert counted == wanted
    place = next(place for place in range(16, 30) if order.environment(place) == 0)
    run.sql(f"UPDATE groups SET environment = 1 WHERE place = {place}")
    (broken,) = run.audit().violations
    assert (broken.kind, f"prompt {place} is problem" in broken.what) == ("order", True)
    assert broken.what.endswith("of environment 0, not 1")
