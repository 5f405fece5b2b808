"""The `ckpt` command on stores with links, damage and hostile text; forks and prunes that go wrong."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import draws
import numpy as np
import pytest
from runs import ABOUT, Finished
from safetensors.numpy import save

from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.launch import main
from cairn.run import faults
from cairn.tools.ckpt import COMMANDS

EVIL = "\x1b[2J\x9b31m[red]x[/nope]\u202e"
"""Clears the screen, colours it, breaks rich's markup, and turns the direction of writing."""


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run the `ckpt` command in this process."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        code = main.ckpt()
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    return run


def commit(store: CheckpointStore, step: int, **about: object) -> Path:
    """A step whose only weight contains the step's number."""
    store.begin(step, ["model", "trainer"])
    weights = save({"weight": np.full(3, step, np.float32)}, {"format": "pt"})
    state = json.dumps({"config": {"learning_rate": step / 1e4, "data": {"name": f"/data/{step}" * 20}}})
    files = {"model/model.safetensors": weights, "trainer/state.json": state.encode()}
    store.write_part(step, "files", files, "run:1")
    store.commit(step, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "metrics": {"loss": 1.5}, **about})
    return store.folder(step)


def made(run: Path, *steps: int) -> CheckpointStore:
    """A store with these steps."""
    store = CheckpointStore(run / "checkpoints")
    for step in steps:
        commit(store, step)
    return store


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """The store of a run with the steps 2, 4 and 6."""
    return made(tmp_path / "run", 2, 4, 6)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Links


def test_a_link_is_no_step(ckpt, tmp_path: Path, store: CheckpointStore):
    """A link is not read, pruned or written through: its target may be another run's only checkpoint."""
    other = made(tmp_path / "other", 3, 9)
    debris = tmp_path / "other" / "precious" / "model"
    debris.mkdir(parents=True)
    (debris / "weights").write_text("mine")
    before = content(tmp_path / "other")
    (store.root / "step_3").symlink_to(other.folder(3))
    (store.root / "step_5").symlink_to(debris.parent)
    (store.root / "step_9").symlink_to(other.folder(9))
    (store.root / "abandoned").mkdir()
    (store.root / "abandoned" / "before_attempt_2").symlink_to(debris.parent)
    assert (store.steps(), store.latest(), store.debris(), store.exists(9)) == ([2, 4, 6], 6, [], False)
    assert "not a step: link to" in ckpt("list", store.root.parent).output
    assert ckpt("prune", store.root.parent, "--keep-last", 1, "--abandoned").code == 0
    assert (store.steps(), len(store.links())) == ([6], 3)
    with pytest.raises(Exception, match="step_9 is a link, but a step must be a real folder"):
        commit(store, 9)
    shutil.rmtree(store.root / "abandoned")
    (store.root / "abandoned").symlink_to(tmp_path / "other")
    assert ckpt("prune", store.root.parent, "--abandoned").code == 0
    assert content(tmp_path / "other") == before


def test_a_checkpoints_folder_may_be_a_link(ckpt, tmp_path: Path, store: CheckpointStore):
    """For example to another disk."""
    store.root.rename(tmp_path / "elsewhere")
    store.root.symlink_to(tmp_path / "elsewhere")
    assert ckpt("prune", tmp_path / "run", "--keep-last", 1).code == 0
    assert store.steps() == [6]


# Forks


def test_a_fork_is_committed_as_any_step_is(ckpt, tmp_path: Path, store: CheckpointStore, monkeypatch):
    """Every file and folder is fsynced before the manifest gets its name."""
    synced: list[Path] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append(path)
        assert path == folder or path in (*folder.parents,) or not (folder / "manifest.json").exists()
        fsync(fd)

    folder = tmp_path / "deep" / "forked" / "checkpoints" / "step_4"
    monkeypatch.setattr(os, "fsync", note)
    assert ckpt("fork", store.folder(4), tmp_path / "deep" / "forked").code == 0
    copied = {path for path in folder.rglob("*") if path.name != "manifest.json"}
    above = {tmp_path, tmp_path / "deep", tmp_path / "deep" / "forked", folder.parent, folder}
    assert set(synced) == copied | above | {folder / ".manifest.json"}
    assert verify(folder).parent.step == 4
    files = [path for path in copied if path.is_file()]
    assert all(p.read_bytes() == (store.folder(4) / p.relative_to(folder)).read_bytes() for p in files)


@pytest.mark.parametrize(("where", "why"), [
    ("run/checkpoints/step_4", "is inside the checkpoint itself"),
    ("run/checkpoints/step_4/model/new", "is inside the checkpoint itself"),
    ("link/step_4", "is inside the checkpoint itself"),
    ("run", "has checkpoints already"),
    ("file", "is not a folder"),
    ("file/new", "is not a folder"),
    ("begun", "a run has begun here"),
])  # fmt: skip
def test_a_fork_to_where_something_is_leaves_it_alone(ckpt, tmp_path, store, where: str, why: str):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(store.root)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "roles.json").write_text("{")
    before = content(tmp_path)
    finished = ckpt("fork", store.folder(4), tmp_path / where)
    assert finished.code == 2
    assert f"error: {tmp_path / where}: {why}" in finished.output
    assert content(tmp_path) == before
    assert not (store.folder(4) / "checkpoints").exists()


def test_a_fork_that_fails_leaves_nothing_and_can_be_repeated(ckpt, tmp_path, store, monkeypatch):
    """A full disk is an error that names the file."""
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setattr(shutil, "copyfile", full_disk)
    finished = ckpt("fork", store.folder(4), tmp_path / "new")
    assert finished.code == 1
    folder = tmp_path / "new" / "checkpoints" / "step_4"
    assert finished.output == f"error: {folder}/model/model.safetensors: No space left on device\n"
    assert not folder.exists()
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["ckpt", "fork", str(store.folder(4)), str(tmp_path / "new")])
    assert main.ckpt() == 0


def full_disk(*_: object) -> None:
    """Replaces a function that writes."""
    raise OSError(28, "No space left on device")


def kill_ckpt(fault: str, *arguments: object) -> None:
    """Run `ckpt` in a process that is killed at a fault point."""
    code = "import sys; from cairn.launch.main import ckpt; sys.exit(ckpt())"
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, env={**os.environ, "CAIRN_FAULT": f"{fault}:kill"}, check=False)
    assert done.returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["commit.before_manifest", "commit.manifest_written", "commit.done"])
def test_a_fork_that_is_killed_is_there_or_is_repeated(ckpt, tmp_path, store, fault: str):
    kill_ckpt(fault, "fork", store.folder(4), tmp_path / "new")
    forked = CheckpointStore(tmp_path / "new" / "checkpoints")
    assert forked.steps() == ([4] if fault == "commit.done" else [])
    assert ckpt("fork", store.folder(4), tmp_path / "new").code == (2 if fault == "commit.done" else 0)
    verify(forked.folder(4))
    assert forked.debris() == []


# Prunes


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["retention.before_delete@2", "retention.manifest_deleted"])
def test_a_prune_that_is_killed_is_repeated(ckpt, store: CheckpointStore, fault: str):
    """No step is half deleted, and the next prune deletes the rest."""
    kill_ckpt(fault.replace("@2", ""), "prune", store.root, "--keep-last", 1)
    for step in store.steps():
        verify(store.folder(step))
    assert ckpt("prune", store.root, "--keep-last", 1).code == 0
    assert (store.steps(), store.debris(), os.listdir(store.root)) == ([6], [], ["step_6"])


@draws.seldom
def test_prunes_at_once(store: CheckpointStore):
    """Each step is deleted once, and no prune fails."""
    for step in range(8, 40, 2):
        commit(store, step)
    code = "import sys; from cairn.launch.main import ckpt; sys.exit(ckpt())"
    argv = [sys.executable, "-c", code, "prune", str(store.root), "--keep-last", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for process in [subprocess.Popen(argv, **pipes) for _ in range(3)]:
        assert (process.communicate()[0].count(b"Traceback"), process.wait()) == (0, 0)
    assert (store.steps(), store.debris()) == ([38], [])


def test_of_pins_that_are_set_at_once_none_is_lost(store: CheckpointStore):
    threads = [threading.Thread(target=store.set_pin, args=(step, True)) for step in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.pins() == set(range(8))


def test_deleting_a_step_that_somebody_else_deletes(store: CheckpointStore):
    """For example a run's retention and `ckpt prune`."""
    errors: list[Exception] = []

    def delete(step: int) -> None:
        try:
            store.delete(step)
        except Exception as error:
            errors.append(error)

    for step in range(8, 28):
        commit(store, step)
        threads = [threading.Thread(target=delete, args=(step,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (errors, store.steps(), store.debris()) == ([], [2, 4, 6], [])


@pytest.mark.parametrize("name", ["pins.json", "config.json"])
@pytest.mark.parametrize("damage", ["folder", "{", "", "[{}]", "5", '{"ckpt": {"keep_last": 0}}'])
def test_without_its_rules_a_prune_deletes_nothing_and_a_list_says_so(ckpt, store, name: str, damage: str):
    path = (store.root if name == "pins.json" else store.root.parent) / name
    path.mkdir() if damage == "folder" else path.write_text(damage)
    finished = ckpt("prune", store.root.parent, "--keep-last", 1)
    assert (finished.code, store.steps()) == (1, [2, 4, 6])
    assert str(path) in finished.output or f"{store.root.parent}: {name}" in finished.output
    finished = ckpt("list", store.root.parent)
    assert finished.code == 0
    assert "warning: the retention rules or pins can't be read: " in finished.output
    assert name in finished.output


# What is printed


def test_text_from_a_manifest_is_printed_as_it_is(
    ckpt, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither the terminal nor rich interprets it as a command."""
    monkeypatch.setenv("COLUMNS", "500")
    about = {"branch": EVIL, "run_id": EVIL, "versions": {EVIL: EVIL}, "dtypes": {EVIL: EVIL}}
    commit(store, 8, **about, metrics={"loss": EVIL, "reward/mean": None, EVIL: EVIL})
    (store.root / "abandoned" / EVIL.replace("/", "")).mkdir(parents=True)
    shutil.copytree(store.folder(8), store.root / "abandoned" / EVIL.replace("/", "") / "step_8")
    step = store.folder(8)
    (step / "model" / EVIL.replace("/", "")).write_text("too many")
    damaged = ckpt("verify", step)
    assert damaged.code == 1
    (step / "model" / EVIL.replace("/", "")).unlink()
    outputs = [damaged, ckpt("list", store.root), ckpt("show", step), ckpt("diff", store.folder(2), step)]
    outputs += [
        ckpt("prune", store.root, "--abandoned"),
        ckpt("fork", step, tmp_path / EVIL.replace("/", "")),
    ]
    outputs += [ckpt("show", step, "--json")]
    for finished in outputs:
        assert finished.code in (0, 1)
        assert all(c.isprintable() or c == "\n" for c in finished.output), finished.output
    assert r"\x9b31m[red]x[/nope]\u202e" in outputs[1].output
    assert r"\x9b31m[red]x[/nope]\u202e" in outputs[2].output


@pytest.mark.parametrize("value", [None, "high", [1], {"a": 1}, True, 10**400, 1e308])
def test_metrics_that_are_no_numbers(ckpt, store: CheckpointStore, value: object):
    """The metric of a diverged run is null; the list shows the other values."""
    commit(store, 8, metrics={"loss": value})
    finished = ckpt("list", store.root)
    assert finished.code == 0
    assert ckpt("prune", store.root, "--keep-best", 1, "--metric", "loss", "--mode", "min").code == 0
    assert 8 in store.steps()


def test_at_80_columns(ckpt, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    """A list has one line per step, and long values are not truncated to a common beginning."""
    monkeypatch.setenv("COLUMNS", "80")
    commit(store, 4000, metrics={"loss": 0.00123456, "reward/mean": 0.5123456})
    lines = ckpt("list", store.root).output.splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80
    output = ckpt("diff", store.folder(2), store.folder(4)).output
    assert max(len(line) for line in output.splitlines() if str(store.root) not in line) <= 80
    flat = "".join(output.split())
    assert flat.count("/data/2") + flat.count("/data/4") > 8
    assert "0.0002" in output
    assert "0.0004" in output


def test_a_manifest_is_shown_in_plain_words(ckpt, store: CheckpointStore):
    output = ckpt("show", store.folder(4)).output
    for line in ("parent none", "metrics loss: 1.5", "parts trainer", "versions none"):
        assert line in [" ".join(shown.split()) for shown in output.splitlines()]
    assert not {"None", "{", "["} & set(output.split())


@pytest.mark.parametrize("command", ["list", "show", "verify", "diff", "prune", "fork", "audit"])
@pytest.mark.parametrize("where", ["nothere", "empty", "file"])
def test_what_is_no_checkpoint_is_bad_usage_for_every_command(
    ckpt, tmp_path, store, command: str, where: str
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    more = {"diff": [store.folder(4)], "fork": [tmp_path / "new"]}.get(command, [])
    finished = ckpt(command, tmp_path / where, *more)
    assert finished.code == 2, finished.output
    assert finished.output.startswith(f"error: {tmp_path / where}")
    assert len(finished.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "give a command; ckpt --help lists them"),
        (("lst",), "ckpt lst: there is no such command; did you mean list?"),
        (("show",), "STEP: it must be given"),
        (("show", "a", "b"), "unexpected argument 'b'"),
        (("show", "--step", "a"), "--step: STEP is given without a flag"),
        (("list", ".", "--josn"), "--josn: there is no such setting; did you mean --json?"),
        (("average", "out"), "STEPS: it must be given"),
        (("average", "a", "b", "out", "--weights", "1,2", "--ema", "0.5"), "--weights and --ema exclude"),
        (("average", "a", "b", "out", "--weights", "0,0"), "is no list of weights; give one such as 1,2,1"),
        (("export", "a", "b", "--format", "hff"), "'hff' is not one of "),
        (("export", "a", "b", "--shard-size", "x"), "--shard-size: 'x' is no size"),
        (("verify", "s3x://bucket/step_2"), "PATH: s3x:// is no object store; known are s3://"),
        (
            ("audit", "s3://bucket/run"),
            "RUN: s3://bucket/run is a URL, where neither rollouts nor a ledger",
        ),
    ],
)
def test_wrong_arguments(ckpt: Callable[..., Finished], argv: tuple[str, ...], words: str):
    done = ckpt(*argv)
    assert (done.code, words in done.output) == (2, True), done.output


def test_help_of_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, command in COMMANDS.items():
        monkeypatch.setattr("sys.argv", ["ckpt", name, "--help"])
        with pytest.raises(SystemExit, match="0"):
            main.ckpt()
        shown = capsys.readouterr().out
        first = command.positional[0].upper()
        assert shown.startswith((f"usage: ckpt {name} {first}", f"usage: ckpt {name} [{first}]"))
        assert "--json" in shown
