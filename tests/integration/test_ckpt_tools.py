"""The `ckpt` command, on checkpoints with a run around them and without."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import (
    CONFIGS,
    Finished,
    Shell,
    assert_published,
    assert_same_bits,
    flip,
    read,
    rows,
    step_folder,
    steps,
    tensors,
)

from cairn.launch import main


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        code = main.ckpt()
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    return run


@pytest.fixture(scope="module")
def made(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 2, 4, 6 and 8, of which its rules keep the last two and every fourth.

    It is the beginning of a recipe, whose published numbers it has.
    """
    run = tmp_path_factory.mktemp("made") / "run"
    flags = ("--max-steps", 8, "--ckpt.interval", 2, "--output-dir", run)
    shell.succeed("sft", "@", f"{CONFIGS}/sft.toml", *flags)
    assert_published("recipes/whole_answers", "examples", run)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def data(finished: Finished):
    """What a command printed with --json."""
    assert finished.code == 0, finished.output
    text = finished.output  # on a slow machine with lines of progress, which go to stderr
    begin = min(at for at in (text.find("{"), text.find("[")) if at >= 0)
    return json.JSONDecoder().raw_decode(text, begin)[0]


def damage(step: Path) -> Path:
    """Change one byte of a step."""
    file = step / "trainer" / "optimizer.safetensors"
    flip(file, file.stat().st_size // 2)
    return file


def test_list_shows_each_step_and_what_keeps_it(ckpt, run: Path):
    """Damaged, partial and abandoned ones, too; the folder may stand alone."""
    (step_folder(run, 2) / "trainer" / "state.json").unlink()
    (run / "checkpoints" / "step_9" / "model").mkdir(parents=True)
    (run / "checkpoints" / "abandoned" / "before_attempt_2").mkdir(parents=True)
    step_folder(run, 4).rename(run / "checkpoints" / "abandoned" / "before_attempt_2" / "step_4")
    found = {Path(row["folder"]).name: row for row in data(ckpt("list", run, "--json"))}
    assert found["step_2"]["state"].startswith("damaged: ")
    assert "state.json" in found["step_2"]["state"]
    assert found["step_9"]["state"] == "partial"
    assert found["step_4"]["state"] == "abandoned (before_attempt_2)"
    assert (found["step_8"]["state"], found["step_8"]["kept_by"]) == ("complete", ["newest", "all"])
    assert found["step_8"]["metrics"]["loss"] == rows(run)[7]["loss"]
    alone = run / "checkpoints"
    (run / "config.json").unlink()
    assert [Path(row["folder"]).name for row in data(ckpt("list", alone, "--json"))] == [
        *("step_2", "step_6", "step_8", "step_9", "step_4"),
    ]
    for text in ("branch_1", "complete", "partial", "abandoned"):
        assert text in ckpt("list", run).output


def test_verify_finds_damage_and_says_where(ckpt, run: Path):
    """Exit code 1 then, 0 otherwise."""
    assert ckpt("verify", run).code == 0
    file = damage(step_folder(run, 6))
    finished = ckpt("verify", run, "--json")
    assert finished.code == 1
    results = {Path(row["folder"]).name: row for row in json.loads(finished.output)}
    assert {name for name, row in results.items() if not row["ok"]} == {"step_6"}
    assert f"{file}: changed between bytes 0 and {file.stat().st_size}" in results["step_6"]["problem"]


def test_diff_names_what_changed(ckpt, run: Path):
    """Weights by name with how much; what is the same is not named."""
    a, b = step_folder(run, 2), step_folder(run, 8)
    report = data(ckpt("diff", a, b, "--json"))
    before, after = tensors(a), tensors(b)
    assert {row["name"] for row in report["tensors"]} == {
        name.removeprefix("model/") for name in before if name.startswith("model/")
    }
    for row in report["tensors"]:
        change = (after[f"model/{row['name']}"] - before[f"model/{row['name']}"]).double()
        assert row["max_change"] == pytest.approx(change.abs().max().item())
        norm = before[f"model/{row['name']}"].double().norm().item()
        assert row["relative_change"] == pytest.approx(change.norm().item() / norm)
    assert report["config"] == report["versions"] == {}
    assert "loss" in report["metrics"]
    same = data(ckpt("diff", a, a, "--json"))
    assert {row["max_change"] for row in same["tensors"]} == {0.0}
    assert "differ" in ckpt("diff", a, b).output


def test_prune_deletes_what_no_rule_keeps(ckpt, run: Path):
    """And says so before, if asked; pins keep a step; debris goes."""
    for step in (7, 9):  # what is newer than the newest step may be a save under way
        (run / "checkpoints" / f"step_{step}" / "model").mkdir(parents=True)
    rules = ("--keep-last", 1, "--keep-every", 4)
    dry = data(ckpt("prune", run, *rules, "--dry-run", "--json"))
    assert [Path(name).name for name in dry["deleted"]] == ["step_2", "step_6"]
    assert [Path(name).name for name in dry["debris"]] == ["step_7"]
    assert steps(run) == [2, 4, 6, 8]
    ckpt("prune", run, *rules, "--pin", 2)
    assert steps(run) == [2, 4, 8]
    assert not (run / "checkpoints" / "step_7").exists()
    assert (run / "checkpoints" / "step_9").exists()
    ckpt("prune", run, *rules, "--unpin", 2)
    assert steps(run) == [4, 8]


def test_prune_never_deletes_the_newest_good_step(ckpt, run: Path):
    """Even if a damaged one is newer."""
    damage(step_folder(run, 8))
    report = data(ckpt("prune", run, "--keep-last", 1, "--json"))
    assert steps(run) == [6, 8]
    assert report["kept"]["6"] == ["newest good"]
    assert len(report["damaged"]) == 1


def test_no_run_has_to_be_around_a_checkpoint(ckpt, run: Path, tmp_path: Path):
    """Each command works on steps that were copied elsewhere, whatever the folder is called."""
    bare = Path(shutil.copytree(run / "checkpoints", tmp_path / "elsewhere"))
    shutil.rmtree(run)
    step = bare / "step_4"
    assert len(data(ckpt("list", bare, "--json"))) == 4
    assert [row["step"] for row in data(ckpt("list", step, "--json"))] == [4]
    assert data(ckpt("show", step, "--json"))["step"] == 4
    assert len(data(ckpt("verify", bare, "--json"))) == 4
    assert data(ckpt("verify", step, "--json")) == [{"folder": str(step), "ok": True, "problem": None}]
    assert data(ckpt("diff", step, bare / "step_6", "--json"))["b"]["step"] == 6
    assert data(ckpt("prune", bare, "--dry-run", "--json"))["deleted"] == []
    assert data(ckpt("prune", bare, "--keep-last", 3, "--json"))["deleted"] == [str(bare / "step_2")]
    assert data(ckpt("fork", step, tmp_path / "forked", "--json"))["parent"]["step"] == 4


def test_a_fork_is_a_run_of_its_own(ckpt, shell: Shell, run: Path, tmp_path: Path):
    """It goes on to the same weights, and the run that it comes from is left as it was."""
    forked = tmp_path / "forked"
    report = data(ckpt("fork", step_folder(run, 4), forked, "--json"))
    manifest = read(step_folder(run, 4) / "manifest.json")
    assert report["parent"] == {"run_id": manifest["run_id"], "step": 4}
    assert report["run_id"] != manifest["run_id"]
    flags = ("--max-steps", 8, "--ckpt.resume", "latest", "--ckpt.verify", "off", "--output-dir", forked)
    shell.succeed("sft", "@", f"{CONFIGS}/sft.toml", *flags)
    assert_same_bits(tensors(step_folder(forked, 8)), tensors(step_folder(run, 8)))
    assert read(step_folder(forked, 8) / "manifest.json")["run_id"] == report["run_id"]
    assert steps(run) == [2, 4, 6, 8]
    for audited, first in ((run, 1), (forked, 5)):
        report = data(ckpt("audit", audited, "--json"))
        assert (report["ok"], report["first_step"], report["last_step"]) == (True, first, 8)


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_folder_without_checkpoints(ckpt, tmp_path: Path, command: str):
    """Exit code 2, and the folder's name."""
    finished = ckpt(command, tmp_path)
    assert (finished.code, finished.output) == (2, f"error: {tmp_path}: there are no checkpoints here\n")


def test_a_run_instead_of_a_step(ckpt, run: Path):
    """`show` and its like take one step, and say which there is."""
    finished = ckpt("show", run)
    assert (finished.code, finished.output) == (
        2,
        f"error: {run}: give one step, such as {step_folder(run, 8)}\n",
    )
    assert read(step_folder(run, 8) / "manifest.json") == data(ckpt("show", step_folder(run, 8), "--json"))


# What else may befall a run's folder


def test_a_run_goes_on_through_damaged_files(ckpt, shell: Shell, run: Path):
    """As a power cut may leave them; what is damaged is kept beside, and said once."""
    history, metrics = run / "history.jsonl", run / "metrics.jsonl"
    history.write_bytes(history.read_bytes()[:-7])
    lines = metrics.read_bytes().split(b"\n")
    metrics.write_bytes(b"\n".join([*lines[:3], b'{"step": 4, "lo\xff', *lines[4:]]))
    (run / "roles.json").write_bytes(b"")
    (run / "heartbeats" / "trainer.json").write_bytes(b"{}")
    (run / "stop.json").mkdir()
    sft = ("sft", "@", f"{CONFIGS}/sft.toml", "--output-dir", run, "--ckpt.resume", "auto")
    output = shell.succeed(*sft, "--max-steps", 9)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 5, 6, 7, 8, 9]
    for name, content in (("roles.json", b""), ("metrics.jsonl", b'{"step": 4, "lo\xff\n')):
        assert (run / f"{name}.damaged-1").read_bytes() == content
        assert output.count(f"now {'in ' if content else ''}{name}.damaged-1") == 1
    assert read(run / "roles.json")["number"] == 2
    found = json.loads(ckpt("audit", run, "--json").output)
    lost, behind = sorted(row["what"] for row in found["violations"])
    assert lost == "metrics.jsonl lacks steps 4 to 4"
    assert behind.startswith("the row of step 5, or the one before it, is not as it was written")


def test_a_run_whose_folder_is_deleted_ends(shell: Shell, tmp_path: Path):
    """With an error that says so, not with a traceback of the launcher, and leaves no process."""
    run = tmp_path / "run"
    with shell.start("sft", "@", f"{CONFIGS}/sft.toml", "--max-steps", 10**6, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) > 1)
        run.rename(tmp_path / "gone")
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 1
    assert "nothing more is written" in finished.output
    assert "Traceback" not in finished.output
