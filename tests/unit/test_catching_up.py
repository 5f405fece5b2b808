"""Small files of a run on a disk that is behind, and in an object store where they are torn."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import make_step

from cairn.checkpoint.eval_metrics import RATINGS
from cairn.checkpoint.store import PINS, CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.attempt import begin, restore_roles
from cairn.launch.jobs.upload import small_files
from cairn.launch.plan.remote_start import with_remote
from cairn.launch.start import choose_start
from cairn.remote import Objects, RemoteStore
from cairn.remote.run_files import EARLIER, FOLDER, SUMS, RunFiles
from cairn.remote.uploads import RunUploads, Uploader
from cairn.run.messages import Attempt

SAVED = (5, 10, 15, 20)


class Run:
    """A run on a machine with a disk, which saves and validates every five steps, and uploads these."""

    def __init__(self, folder: Path, remote: bool = True):
        self.folder = folder
        self.there = folder / "remote"
        self.url = f"file://{self.there}"
        self.config = SFTConfig(
            output_dir=str(folder / "run"),
            max_steps=99,
            ckpt=CkptConfig(resume="auto", remote=self.url if remote else None),
        )
        self.run = self.config.run_directory()
        self.store = CheckpointStore(self.run.checkpoints)
        self.files = small_files(self.run)

    def start(self) -> Attempt:
        """Begin an attempt, as the command does; the next one can begin at once."""
        config, away = with_remote(self.config, ["trainer"])
        start = choose_start(config, needs=["trainer"], away=away)
        try:
            return begin(self.run, self.config, start, {"trainer": {}}, command="sft")
        finally:
            self.run.unlock()

    def train(self, attempt: Attempt, steps: Iterable[int]) -> None:
        """Do steps; those that are saved are uploaded, if there is a store."""
        ckpt = self.config.ckpt or CkptConfig()
        remote = RemoteStore(Objects(self.url)) if ckpt.remote else None
        uploads = RunUploads(self.store, ckpt, 99)
        uploader = Uploader(uploads, remote, attempt.owner, run_files=self.files) if remote else None
        for step in steps:
            row: dict[str, Any] = {"step": step, "loss": 1 / step}
            if step in SAVED:
                row |= {"validation/held/loss": 2 / step}
                about = {"run_id": attempt.run_id, "branch": attempt.branch}
                self.run.evals.append({"step": step, "name": "held", **about, "loss": 2 / step})
            self.run.metrics.append(row)
            if step in SAVED:
                about |= {"attempt": attempt.number}
                files = {"trainer/state.json": b'{"seed": 0, "progress": {"step": 1}}'}
                make_step(self.store.root, step, files, **about)
                if uploader:
                    uploader.upload(step)

    def steps(self, log: Path | None = None) -> list[int]:
        """The steps that a log has rows of."""
        path = log or self.run.metrics.path
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def copy(self, name: str) -> Path:
        """A copy of the disk as it is."""
        return Path(shutil.copytree(self.run.path, self.folder / name))


def test_a_disk_that_is_restored_from_a_copy_gets_its_rows_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of the same attempt: nothing tells that it is behind but what is in the files."""
    run = Run(tmp_path)
    attempt = run.start()
    run.train(attempt, range(1, 13))
    backup = run.copy("backup")
    run.run.history.restart("trainer", step=12, reason="died", how="again")
    run.train(attempt, range(13, 23))
    run.store.set_pin(15, True)
    run.train(attempt, [])
    RunFiles(Objects(run.url)).put([run.store.root / PINS])
    shutil.rmtree(run.run.path)
    backup.rename(run.run.path)
    assert run.steps()[-1] == 12

    second = run.start()
    assert (second.start_step, second.number) == (20, 2)
    assert run.steps() == list(range(1, 21))
    assert run.steps(run.run.evals.path) == list(SAVED)
    assert [event["event"] for event in run.run.history.rows()] == ["attempt", "restart", "attempt"]
    assert run.store.pins() == {15}
    said = capsys.readouterr().out
    assert "this disk lacked what" in said
    assert "metrics.jsonl of steps 13 to 20; history.jsonl 1 events; evals.jsonl of steps 15, 20" in said
    assert "warning" not in said
    run.train(second, [21, 22, 23])
    (there,) = RunFiles(Objects(run.url)).copies("metrics.jsonl").good
    assert len(there.splitlines()) == 20, "and no upload has taken any away"
    assert run.start().number == 3
    assert "lacked" not in capsys.readouterr().out


def test_torn_copies_in_the_store_are_said_and_the_ones_before_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With an empty disk, and the newest commits damaged as well; the torn copy is put again as a whole."""
    run = Run(tmp_path)
    attempt = run.start()
    run.train(attempt, range(1, 21))
    for name in ("metrics.jsonl", "evals.jsonl"):
        whole = (run.there / FOLDER / name).read_bytes()
        (run.there / FOLDER / name).write_bytes(whole[:100])
    (run.there / "committed/step_20.json").write_bytes(b"{")
    shutil.rmtree(run.run.path)
    second = run.start()
    assert (second.start_step, run.steps()) == (15, list(range(1, 16)))
    assert run.steps(run.run.evals.path) == [5, 10, 15]
    said = capsys.readouterr().out
    assert f"{run.url}/run/metrics.jsonl: is not what was uploaded (100 bytes" in said
    assert "warning" not in said

    shutil.rmtree(run.there / EARLIER)
    shutil.rmtree(run.run.path)
    (run.there / FOLDER / "metrics.jsonl").write_bytes(whole[:100])
    run.start()
    assert "warning: metrics.jsonl has no row of steps" in capsys.readouterr().out


def test_stores_of_earlier_versions_have_no_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What is there is taken as it is; the next upload adds sums, also of the copy that it replaces."""
    run = Run(tmp_path)
    run.train(run.start(), range(1, 11))
    (run.there / SUMS).unlink()
    shutil.rmtree(run.there / EARLIER)
    shutil.rmtree(run.run.path)
    second = run.start()
    assert (run.steps(), capsys.readouterr().out.count("not what")) == (list(range(1, 11)), 0)
    run.train(second, range(11, 16))
    assert json.loads((run.there / SUMS).read_bytes()).keys() >= {"metrics.jsonl", "evals.jsonl"}
    (run.there / FOLDER / "metrics.jsonl").write_bytes(b"")
    copies = RunFiles(Objects(run.url)).copies("metrics.jsonl")
    assert [len(content.splitlines()) for content in copies.good] == [10]


def test_rows_of_a_branch_that_was_left_do_not_come_back(tmp_path: Path):
    """After a rewind the copy of before is none of the run's any more."""
    run = Run(tmp_path)
    run.train(run.start(), range(1, 16))
    run.config = run.config.sharing(ckpt=CkptConfig(resume_step=5, remote=run.url))
    attempt = run.start()
    assert run.steps() == [1, 2, 3, 4, 5]
    run.train(attempt, range(6, 11))
    assert not (run.there / EARLIER / "metrics.jsonl").exists()
    run.config = run.config.sharing(ckpt=CkptConfig(resume="auto", remote=run.url))
    assert (run.start().start_step, run.steps()) == (10, list(range(1, 11)))


def test_a_file_that_is_put_is_known_before_it_is_there(tmp_path: Path):
    """Whoever is killed between the sums and the object has spoilt neither copy; what is unchanged stays."""
    objects = Objects(f"file://{tmp_path}/remote")
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\n")
    first = RunFiles(objects)
    first.put([path])
    put: list[str] = []
    real, objects.put = objects.put, lambda name, content: (put.append(name), real(name, content))[1]
    first.put([path])
    assert put == []
    path.write_bytes(b"one\ntwo\n")

    def killed(name: str, content: bytes) -> str | None:
        if name == f"{FOLDER}/metrics.jsonl":
            raise KeyboardInterrupt
        return real(name, content)

    objects.put = killed
    with pytest.raises(KeyboardInterrupt):
        RunFiles(objects).put([path])
    objects.put = real
    assert RunFiles(objects).copies(path.name).good == [b"one\n"]
    RunFiles(objects).put([path])
    assert RunFiles(objects).copies(path.name).good == [b"one\ntwo\n"]
    assert objects.get(f"{EARLIER}/metrics.jsonl") == b"one\n"


def test_what_is_missing_without_a_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The disk's own files may be older than its steps, too."""
    run = Run(tmp_path, remote=False)
    run.train(run.start(), range(1, 21))
    for path in (run.run.metrics.path, run.run.evals.path):
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        left = [row for row in rows if row["step"] not in (10, 11)]
        path.write_text("".join(json.dumps(row) + "\n" for row in left))
    run.start()
    assert "warning: metrics.jsonl has no row of steps 10 to 11" in capsys.readouterr().out
    rows = [*run.run.metrics.rows(), {"step": 10, "validation/held/loss": 0.2}]
    run.run.metrics.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.run.history.path.unlink()
    run.start()
    said = capsys.readouterr().out
    assert "warning: evals.jsonl lacks 'held' of steps 10" in said
    assert "warning: history.jsonl ends in attempt 0 of 2" in said


@pytest.mark.parametrize("damage", ["empty", "gone", "whole"])
def test_lost_roles_of_a_complete_run_are_written_again(tmp_path: Path, damage: str):
    """The last step says whose they are."""
    run = Run(tmp_path, remote=False)
    attempt = run.start()
    run.train(attempt, range(1, 6))
    roles = run.run.roles
    before = roles.read_bytes()
    if damage != "whole":
        roles.write_bytes(b"") if damage == "empty" else roles.unlink()
    start = choose_start(run.config, needs=["trainer"])
    restore_roles(run.config, start, "sft")
    if damage == "whole":
        assert roles.read_bytes() == before
        return
    found = run.run.attempt()
    assert found
    assert (found.run_id, found.number, found.branch) == (attempt.run_id, 1, attempt.branch)
    assert not run.run.is_locked()


NAMES = ("metrics.jsonl", "evals.jsonl", "history.jsonl", "pins.json", "roles.json", "recipe.json")


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(older=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([3, 8, 12, None])), remote=st.booleans())
def test_any_files_may_be_older_than_the_others(
    older: dict[str, int | None],
    remote: bool,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
):
    """Any of them, each of a time of its own, or gone: after a resume nothing is missing, or it is said."""
    run = Run(tmp_path_factory.mktemp("older"), remote)
    attempt = run.start()
    disk = {3: Path(), 8: Path(), 12: Path()}
    at = 0
    for step in disk:
        run.train(attempt, range(at + 1, step + 1))
        disk[step], at = run.copy(f"at_{step}"), step
    run.train(attempt, range(13, 18))
    paths = {path.name: path for path in run.run.path.rglob("*") if path.name in NAMES}
    for name, step in older.items():
        path = paths.get(name)
        if path is None:
            continue
        before = None if step is None else disk[step] / path.relative_to(run.run.path)
        path.unlink()
        if before is not None and before.exists():
            shutil.copy(before, path)
    capsys.readouterr()
    second = run.start()
    said = capsys.readouterr().out
    assert second.start_step == 15
    assert second.run_id == attempt.run_id
    missing = sorted(set(range(1, 16)) - set(run.steps()))
    assert not missing or (not remote and "metrics.jsonl has no row of steps" in said)
    wanted = [5, 10, 15]
    evaluated = run.steps(run.run.evals.path)
    if evaluated != wanted:
        assert not remote
        assert "evals.jsonl lacks 'held'" in said or "metrics.jsonl has no row" in said


def test_ratings_follow_the_evaluations_that_are_taken_over(tmp_path: Path):
    """They are a table of them."""
    run = Run(tmp_path)
    attempt = run.start()
    run.store.root.mkdir(parents=True, exist_ok=True)
    (run.store.root / RATINGS).write_text("{}")
    run.train(attempt, range(1, 6))
    backup = run.copy("backup")
    run.train(attempt, range(6, 11))
    shutil.rmtree(run.run.path)
    backup.rename(run.run.path)
    run.start()
    rated = json.loads((run.store.root / RATINGS).read_bytes())
    assert len(rated) == 2
