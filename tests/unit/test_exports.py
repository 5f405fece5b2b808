"""Exports of steps while a run trains, and of all at once: what is due, done, waiting and given up."""

import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import make
from runs import ABOUT, Finished, flip, read, run_python
from safetensors.torch import load_file

from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.step_jobs import StepJobs
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig, ExportConfig
from cairn.config.cli import load
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig
from cairn.formats import EXPORTERS, Content, Verification, WriteOptions
from cairn.formats.transfer.export_folder import (
    MOST_TRIES,
    RECORD,
    UNFINISHED,
    Exports,
    InTheWay,
    RunExports,
    run_exports,
)
from cairn.launch import main
from cairn.launch.jobs import export
from cairn.launch.jobs.export import Exporter, exports_in_words, refuse_conflicts, with_exports
from cairn.launch.start import Start
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.output import no_progress

RUN_ID = ABOUT["run_id"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a Hugging Face directory."""
    return make("qwen3_tied", tmp_path_factory.mktemp("hub") / "model")


def commit(store: CheckpointStore, step: int, model: Path) -> Path:
    """A step that holds weights only."""
    store.begin(step, ["model"])
    files = {f"model/{path.name}": path.read_bytes() for path in model.iterdir()}
    store.write_part(step, "files", files, "run:1")
    store.commit(step, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "parts": ["model"]})
    return store.folder(step)


@pytest.fixture
def store(tmp_path: Path, model: Path) -> CheckpointStore:
    """The steps 2, 4 and 6 of a run."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (2, 4, 6):
        commit(store, step, model)
    return store


def made_in(folder: Path, **settings: object) -> RunExports:
    """The exports of a run of six steps."""
    config = ExportConfig.model_validate({"folder": str(folder), **settings})
    store = CheckpointStore(folder.parent / "run" / "checkpoints")
    return run_exports(config, store, last=6, attempt="run:1")


def exporter_of(made: RunExports) -> Exporter:
    return Exporter(made, verify=True, missed=lambda step, reason: None)


def finish(made: RunExports) -> None:
    exporter = exporter_of(made)
    while exporter.export_next(no_progress):
        pass


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Settings


@pytest.mark.parametrize("command", [SFTConfig, RLConfig])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ckpt.interval 10 --ckpt.export.interval 15", r"export\.interval = 15 is no multiple of"),
        ("--ckpt.export.interval 15", r"export\.interval = 15 needs interval"),
        ("--ckpt.export.shard-size 2X", r"--ckpt\.export\.shard-size: '2X' is no size"),
        ("--ckpt.export.dtype bf16", r"--ckpt\.export\.dtype: 'bf16' is not one of .* bfloat16\?"),
        ("--ckpt.export.keep 0", r"--ckpt\.export\.keep: "),
        ("--ckpt.export.format HF", r"--ckpt\.export\.format HF: Cairn writes .*\bhf\b"),
        ("--ckpt.export.quantize q8_0", r"--ckpt\.export\.quantize q8_0: the format hf has no quantisation"),
        ("--ckpt.export.folder {}/checkpoints/out", r"--ckpt\.export\.folder .*/out: lies in .*/checkpoints"),
        ("--ckpt.export.folder {}/checkpoints", r"--ckpt\.export\.folder .*: lies in "),
        ("--ckpt.dir {}/x --ckpt.export.folder {}/x/y", r"--ckpt\.export\.folder .*: lies in .*/x,"),
    ],
)
def test_bad_settings_are_refused_by_name(command: type, flags: str, said: str, tmp_path: Path):
    argv = [flag.format(tmp_path) for flag in flags.split()]
    with pytest.raises(UsageError, match=said):
        with_exports(load(command, ["--output-dir", str(tmp_path), *argv]))
    assert names_in(tmp_path) == []


def test_the_bare_section_exports_every_saved_step(tmp_path: Path):
    """Into the output folder; of rl, all roles have the same settings. Without it nothing is exported."""
    config = with_exports(load(RLConfig, ["--output-dir", str(tmp_path), "--ckpt.export"]))
    assert config.ckpt
    assert config.ckpt == config.trainer.ckpt == config.orchestrator.ckpt
    assert config.ckpt.export == ExportConfig(folder=str(tmp_path / "exports"))
    assert exports_in_words(config) == f"exports every saved step as hf to {tmp_path}/exports"
    bare = load(SFTConfig, ["--ckpt"])
    assert with_exports(bare) is bare
    assert exports_in_words(bare) is None


def test_a_dry_run_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And refuses what a run refuses."""
    flags = ["sft", "--dry-run", "--output-dir", str(tmp_path), "--ckpt.interval", "5"]
    more = ["--ckpt.export.interval", "10", "--ckpt.export.dtype", "bfloat16"]
    monkeypatch.setattr("sys.argv", [*flags, *more])
    assert main.sft() == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ckpt"]["export"]["folder"] == f"{tmp_path}/exports"
    assert f"exports every 10 steps as hf, bfloat16 to {tmp_path}/exports" in captured.err
    monkeypatch.setattr("sys.argv", [*flags, "--ckpt.export.format", "x"])
    assert main.sft() == 2
    assert "--ckpt.export.format x" in capsys.readouterr().err


# What is due, and what is done


def test_multiples_and_the_last_step_are_due(tmp_path: Path):
    """With `keep`, only the newest of them: what would be deleted again is not exported."""
    steps = [1, 2, 3, 4, 5, 6]
    assert made_in(tmp_path).due(steps) == steps
    assert made_in(tmp_path, interval=4).due(steps) == [4, 6]
    assert made_in(tmp_path, interval=2, keep=2).due([6, 5, 4, 3, 2]) == [4, 6]


def test_what_exists_is_done_and_is_skipped(store: CheckpointStore, tmp_path: Path):
    """Each export says what it was made from; a copy of it counts as well."""
    made = made_in(tmp_path / "out", dtype="bfloat16")
    assert made.waiting() == [2, 4, 6]
    finish(made)
    assert [n for n in names_in(tmp_path / "out") if not n.startswith(".")] == ["step_2", "step_4", "step_6"]
    weights = load_file(tmp_path / "out" / "step_4" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    record = read(tmp_path / "out" / "step_4" / RECORD)
    assert (record["run_id"], record["step"], record["options"]["dtype"]) == (RUN_ID, 4, "BF16")
    times = [(tmp_path / "out" / f"step_{n}").stat().st_mtime_ns for n in (2, 4, 6)]
    again = made_in(tmp_path / "out", dtype="bfloat16")
    assert (again.waiting(), again.missing()) == ([], [])
    finish(again)
    assert [(tmp_path / "out" / f"step_{n}").stat().st_mtime_ns for n in (2, 4, 6)] == times
    shutil.rmtree(tmp_path / "out" / "step_2")
    assert again.waiting() == [2]


def test_another_step_of_that_number_is_not_taken_for_it(store: CheckpointStore, tmp_path: Path, model: Path):
    """Such as one of an abandoned branch, one with other options, or a folder of somebody else."""
    made = made_in(tmp_path / "out")
    finish(made)
    store.delete(4)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "vocab.txt").write_text("x")
    commit(store, 4, other)
    assert made.missing() == [4]
    with pytest.raises(InTheWay, match=r"step_4: is an export of another step of that number"):
        made.exports.is_done(store.folder(4))
    with pytest.raises(InTheWay, match=r"is an export with dtype = None, not with dtype = F16"):
        made_in(tmp_path / "out", dtype="float16").exports.is_done(store.folder(2))
    with pytest.raises(InTheWay, match=r"is an export as hf, not as dcp"):
        made_in(tmp_path / "out", format="dcp").exports.is_done(store.folder(2))
    (tmp_path / "out" / "step_2" / RECORD).unlink()
    with pytest.raises(InTheWay, match=r"exists, and is no export of a run"):
        made_in(tmp_path / "out").exports.is_done(store.folder(2))


def test_a_run_is_refused_a_folder_with_other_exports(store: CheckpointStore, tmp_path: Path):
    """Before anything is touched; exports of its own steps are no obstacle to its resuming."""

    def refuse(start: Start, *flags: str) -> None:
        argv = ["--output-dir", str(tmp_path / "run"), "--ckpt.export.folder", str(tmp_path / "out"), *flags]
        refuse_conflicts(with_exports(load(SFTConfig, argv)), start)

    finish(made_in(tmp_path / "out"))
    resumed = Start(store, store.folder(6), store.manifest(6))
    refuse(resumed)
    with pytest.raises(UsageError, match=r"--ckpt\.export\.folder .* dtype = None, not .*F16 \(and 2 more\)"):
        refuse(resumed, "--ckpt.export.dtype", "float16")
    with pytest.raises(UsageError, match=rf"is an export of the run {RUN_ID}, not of this one"):
        refuse(Start(CheckpointStore(tmp_path / "new" / "checkpoints")))


def test_exports_of_abandoned_steps_are_set_aside(store: CheckpointStore, tmp_path: Path):
    made = made_in(tmp_path / "out")
    finish(made)
    aside = made.exports.set_aside_after(2, "before_attempt_2")
    assert aside == tmp_path / "out" / "abandoned" / "before_attempt_2"
    assert names_in(aside) == ["step_4", "step_6"]
    assert made.missing() == [4, 6]
    assert made.exports.set_aside_after(2, "before_attempt_3") is None


def test_only_the_newest_exports_are_kept(store: CheckpointStore, tmp_path: Path, model: Path):
    """And what is no export of a run is never deleted, nor is what is deleted exported again."""
    (tmp_path / "out" / "step_1").mkdir(parents=True)
    made = made_in(tmp_path / "out", keep=2)
    finish(made)
    assert {"step_1", "step_4", "step_6"} == {n for n in names_in(tmp_path / "out") if n[0] != "."}
    commit(store, 8, model)
    finish(made)
    assert {"step_1", "step_6", "step_8"} == {n for n in names_in(tmp_path / "out") if n[0] != "."}
    assert made.waiting() == []


# Failures


def test_a_step_that_cannot_be_exported_does_not_stop_the_others(
    store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Damage is final; it is told, and at the end as well."""
    flip(store.folder(4) / "model" / "model.safetensors", -3 % 4096)
    told: list[tuple[int, str]] = []
    made = made_in(tmp_path / "out")
    exporter = Exporter(made, verify=True, missed=lambda *what: told.append(what))
    while exporter.export_next(no_progress):
        pass
    assert [step for step, _ in told] == [4]
    assert "changed between bytes" in told[0][1]
    assert made.missing() == [4]
    assert made.waiting() == []
    assert "step 4 is not exported" in caplog.text
    said = export.what_is_missing(made)
    assert said is not None
    assert said.startswith("step 4: ")
    assert "changed between bytes" in said
    later = run_exports(ExportConfig(folder=str(tmp_path / "out")), store, last=6, attempt="run:2")
    assert later.waiting() == [4], "another attempt of the run tries again"


def test_what_the_system_refuses_is_tried_a_few_times(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A full disk may have room again; while the run trains, the next try waits."""
    tries: list[Path] = []

    def full(content: object, folder: Path, options: WriteOptions) -> None:
        tries.append(folder)
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(EXPORTERS["hf"], "write", full)
    made = made_in(tmp_path / "out", interval=6)
    exporter = exporter_of(made)
    assert exporter.export_next(no_progress, last=False)
    assert not exporter.export_next(no_progress, last=False)
    monkeypatch.setattr(export, "RETRY_SECONDS", 0.0)
    finish(made)
    assert len(tries) == MOST_TRIES
    assert not any(name.endswith(UNFINISHED) for name in names_in(tmp_path / "out"))
    monkeypatch.undo()
    assert made.waiting() == []
    assert made.missing() == [6]


def test_a_step_deleted_while_it_is_exported_is_no_failure(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Nothing half is left of it, and the next one's turn comes."""
    write = EXPORTERS["hf"].write

    def deleting(content: Content, folder: Path, options: WriteOptions) -> Verification:
        if folder.name == f"step_2{UNFINISHED}":
            store.delete(2)
        return write(content, folder, options)

    monkeypatch.setattr(EXPORTERS["hf"], "write", deleting)
    made = made_in(tmp_path / "out")
    finish(made)
    assert "step 2 was deleted while it was exported" in caplog.text
    assert [name for name in names_in(tmp_path / "out") if name[0] != "."] == ["step_4", "step_6"]
    assert made.exports.failures("run:1").steps == {}


# Retention


def test_retention_spares_the_oldest_that_wait_and_says_so(
    store: CheckpointStore, tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
):
    """As many as the settings allow; others are deleted, which the log and history.jsonl say."""
    caplog.set_level(logging.INFO)
    rules = CkptConfig(keep_last=1, export=ExportConfig(folder=str(tmp_path / "out"), max_waiting=1))
    assert rules.export
    run = RunDirectory(tmp_path / "run")
    made = run_exports(rules.export, store, last=100, attempt="run:1")
    jobs = StepJobs([made], history=run.history)
    assert apply_retention(store, rules, jobs.spared) == [4]
    assert store.steps() == [2, 6]
    assert "step 2 stays until it is exported, although no rule keeps it" in caplog.text
    assert "step 4 is not exported: 1 other steps wait already" in caplog.text
    assert jobs.metrics() == {"run/exports_waiting": 3, "run/exports_spared": 1}
    assert [(e["event"], e["step"]) for e in run.history.rows()] == [("not_exported", 4)]
    finish(made)
    commit(store, 8, model)
    assert apply_retention(store, rules, jobs.spared) == [2, 6]
    assert jobs.metrics() == {"run/exports_waiting": 1, "run/exports_spared": 0}
    assert names_in(store.root) == ["step_8"]


def test_ckpt_prune_and_list_know_what_waits(
    store: CheckpointStore, tmp_path: Path, ckpt: Callable[..., Finished]
):
    """They say why a step stays that no rule keeps."""
    run = tmp_path / "run"
    config = with_exports(load(SFTConfig, ["--output-dir", str(run), "--max-steps", "6", "--ckpt.export"]))
    (run / "config.json").write_text(config.model_dump_json())
    rows = json.loads(ckpt("prune", run, "--keep-last", 1, "--json").output)
    assert rows["kept"] == {
        "2": ["waiting for an export or upload"],
        "4": ["waiting for an export or upload"],
        "6": ["newest", "last"],
    }
    assert ckpt("export", run, run / "exports", "--all").code == 0
    assert json.loads(ckpt("prune", run, "--keep-last", 1, "--json").output)["kept"].keys() == {"6"}


# ckpt export --all


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run the `ckpt` command in this process."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        code = main.ckpt()
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    return run


def test_all_steps_are_exported_and_done_ones_skipped(ckpt, store: CheckpointStore, tmp_path: Path):
    """Of a run or of a folder of checkpoints; a damaged step is named, and the others are exported."""
    out = tmp_path / "out"
    flip(store.folder(4) / "model" / "model.safetensors", 4096)
    finished = ckpt("export", tmp_path / "run", out, "--all")
    assert finished.code == 1
    assert f"{store.folder(4)}: NOT EXPORTED: " in finished.output
    assert names_in(out) == [".lock", "step_2", "step_6"]
    flip(store.folder(4) / "model" / "model.safetensors", 4096)
    output = ckpt("export", store.root, out, "--all", "--json").output
    results = json.JSONDecoder().raw_decode(output)[0]  # a slow machine shows its progress behind it
    assert [(row["step"], row["check"].partition(";")[0]) for row in results] == [
        (2, "was there already"),
        (4, "read back and equal"),
        (6, "was there already"),
    ]


def test_all_refuses_what_is_in_the_way(ckpt, store: CheckpointStore, tmp_path: Path):
    """Before it writes anything."""
    out = tmp_path / "out"
    (out / "step_6").mkdir(parents=True)
    refused = ckpt("export", tmp_path / "run", out, "--all")
    assert (refused.code, "step_6: exists, and is no export" in refused.output) == (2, True)
    assert names_in(out) == ["step_6"]
    refused = ckpt("export", store.folder(2), out, "--all")
    assert (refused.code, "is a single step" in refused.output) == (2, True)
    refused = ckpt("export", tmp_path, out, "--all")
    assert (refused.code, "there are no checkpoints here" in refused.output) == (2, True)
    (tmp_path / "file").touch()
    refused = ckpt("export", store.root, tmp_path / "file", "--all")
    assert (refused.code, "is not a folder" in refused.output) == (2, True)


def test_a_killed_export_of_all_is_repeated(ckpt, store: CheckpointStore, tmp_path: Path):
    """SIGKILL in the middle of a step: what is done stays as it is, what is not is begun again."""
    out = tmp_path / "out"
    program = "import sys; from cairn.launch.main import ckpt; sys.exit(ckpt())"
    command = ["export", str(tmp_path / "run"), str(out), "--all", "--dtype", "bfloat16"]
    # Two steps are done, and the third is killed.
    shutil.copytree(store.root, tmp_path / "two" / "checkpoints")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_6")
    assert ckpt("export", tmp_path / "two", *command[2:]).code == 0
    times = [(out / f"step_{n}").stat().st_mtime_ns for n in (2, 4)]
    killed = run_python("-c", program, *command, environment={"CAIRN_FAULT": "export.before_fsync:kill"})
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "step_6").exists()
    assert (out / f"step_6{UNFINISHED}").exists()
    assert ckpt(*command).code == 0
    assert names_in(out) == [".lock", "step_2", "step_4", "step_6"]
    assert [(out / f"step_{n}").stat().st_mtime_ns for n in (2, 4)] == times


def test_two_processes_do_not_disturb_each_other(store: CheckpointStore, tmp_path: Path):
    """Whoever exports into the folder has it alone, and leaves nothing unfinished of others."""
    exports = Exports(tmp_path / "out", "hf", WriteOptions())
    (tmp_path / "out" / f"step_2{UNFINISHED}").mkdir(parents=True)
    (tmp_path / "out" / "mine.unfinished").mkdir()
    holding = (
        "import sys, fcntl; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    )
    with exports.alone():
        pass
    assert names_in(tmp_path / "out") == [".lock", "mine.unfinished"]
    with subprocess.Popen(
        [sys.executable, "-c", holding, str(tmp_path / "out" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout
        assert other.stdin
        other.stdout.readline()
        probe = (
            "import sys; from pathlib import Path; from cairn.formats.transfer.export_folder import *;"
            "from cairn.formats import WriteOptions\n"
            "with Exports(Path(sys.argv[1]), 'hf', WriteOptions()).alone(): print('in', flush=True)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", probe, str(tmp_path / "out")], stdout=subprocess.PIPE
        ) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(3)
            other.stdin.close()
            assert waiting.stdout
            assert waiting.stdout.readline() == b"in\n"
