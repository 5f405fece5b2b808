"""Every small file of a run, damaged in every way that a power cut, a full disk or a person may: the run goes
on, or says what is wrong with which file; nothing good is lost, and what is damaged is kept.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import draws
import pytest
from runs import ABOUT, CONFIGS, REPOSITORY

from cairn.checkpoint.eval_metrics import note, ratings_in, ratings_of
from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.config.optimizer import AdamWConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.inference.pool.membership import ServerList
from cairn.launch.attempt import begin
from cairn.launch.display import StepDisplay
from cairn.launch.plan.recipe import plan_recipe
from cairn.launch.start import choose_start
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.batches import Batch, RLBatch, Sample, Sampling, batch_path, write_batch
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError
from cairn.run.exits import answer
from cairn.run.files import write_json
from cairn.run.heartbeat import Beat, Watch
from cairn.run.history import Account
from cairn.run.messages import Announcement, Attempt, BatchHeader, PolicyName, ShippedBatch
from cairn.tools.audit import audit
from cairn.trainer.tasks.orchestrator_link import ShippedBatches

RUN, BRANCH, PARTS = "0badcafe", "branch_1", ["trainer", "orchestrator"]
LEDGER_RUN = LedgerRun(RUN, BRANCH, FORMAT, 0, 100, 1, 1, 1)
ATTEMPT = Attempt(RUN, 1, "trainer", 0, None, BRANCH)
TRAINED, SHIPPED = 5, 6


def make_config(path: Path, resume_step: int | None = None) -> TrainerConfig:
    """Of a run that goes on by itself, or from a step that the user names."""
    resume = None if resume_step else "auto"
    ckpt = CkptConfig(interval=2, resume=resume, resume_step=resume_step, keep_last=9, verify="load")
    model = ModelConfig(name=str(REPOSITORY / CONFIGS / "model"))
    return TrainerConfig(model=model, output_dir=str(path), max_steps=20, ckpt=ckpt)


def make_batch(step: int) -> RLBatch:
    tokens = range(step, step + 3)
    sample = Sample.of_answer([], tokens, logprobs=tokens, advantages=tokens)
    batch = Batch([sample], {"reward/mean": 0.5}, sampling=Sampling(1.0))
    shipped = ShippedBatch(step, [[step, step]], 1, 3, batch.digest(), step - 1)
    version = str(PolicyName(RUN, BRANCH, step - 1))
    header = BatchHeader(RUN, BRANCH, f"{RUN}:1", step, version, [step], shipped)
    return RLBatch(batch.samples, batch.metrics, sampling=batch.sampling, header=header)


def save(store: CheckpointStore, ledger: Ledger, step: int) -> None:
    progress = {"step": step, "total_tokens": 3 * step, "total_samples": step}
    state = {"progress": progress, "seed": 0, "config": {}}
    files = {
        **{f"model/{path.name}": path.read_bytes() for path in (REPOSITORY / CONFIGS / "model").iterdir()},
        "trainer/state.json": json.dumps(state).encode(),
        "orchestrator/state.json": json.dumps(state).encode(),
        "orchestrator/ledger.sqlite": ledger.snapshot(),
    }
    store.begin(step, ["model", "trainer", "orchestrator"])
    store.write_part(step, "files", files, "run:1")
    about = {**ABOUT, "run_id": RUN, "branch": BRANCH, "parts": PARTS, "metrics": {"loss": 1 / step}}
    about["parent"] = {"run_id": RUN, "step": step - 2} if step > 2 else None
    store.commit(step, {"files": "run:1"}, timeout=0.0, about=about)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves whose machine loses power: 5 steps trained, 2 and 4 saved, 6 batches shipped."""
    path = tmp_path_factory.mktemp("made") / "run"
    run = RunDirectory(path)
    run.logs.mkdir(parents=True)
    run.begin(ATTEMPT)
    run.config.write_text(make_config(path).model_dump_json())
    write_json(run.recipe, {"trainer": {"settings": {}}})
    run.history.begin_attempt(1, None)
    run.history.restart("trainer", step=3, reason="died", how="is started again")
    run.history.recompute(2, 800)
    for role in ("trainer", "orchestrator"):
        run.set_role(role, "running", 1, socket.gethostname())
        run.heartbeats.mkdir(exist_ok=True)
        write_json(run.heartbeat(role), asdict(Beat(1, 5, 5, "step 6", False, 0.0)))
    store = CheckpointStore(run.checkpoints)
    ledger = Ledger(run.ledger, LEDGER_RUN, None, 0)
    for step in range(1, SHIPPED + 1):
        batch = make_batch(step)
        answer = Rollout(5, [7, 8], [-0.25, -0.5], [(f"{RUN}:{BRANCH}:0", 0, 2)], "stop", "gh", 0.5)
        ledger.issue(AnswerGroup(step, step, 0, [1], [answer]))
        ledger.record(step, {0: answer})
        write_batch(batch_path(run.batches, step), batch)
        ledger.ship(batch.header.ledger, {step: step})
        if step > TRAINED:
            continue
        row = {"step": step, "loss": 1 / step, "time/step": 1.0, "time/wait": 0.0, "run/useful_seconds": step}
        run.metrics.append(row | {"total_tokens": 3 * step, "total_samples": step})
        run.versions.folder(step).mkdir(parents=True)
        run.versions.announce(ATTEMPT, step, save=False, last=False)
        if step % 2 == 0:
            save(store, ledger, step)
            run.forget_batches(step)
    ledger.close()
    store.set_pin(2, True)
    run.request_stop("SIGTERM")
    write_json(run.servers, ["http://127.0.0.1:8000"])
    return path


def go_on(path: Path) -> int:
    """All that the run's commands and roles read and write when it goes on; returns the step it is at."""
    config = make_config(path)
    start = choose_start(config, needs=PARTS)
    run = RunDirectory(path)
    attempt = begin(run, config, start, plan_recipe(KINDS["trainer"], config, start), command="trainer")
    assert (attempt.run_id, attempt.number) == (RUN, 2)
    role = RunDirectory(path)
    assert role.attempt() == attempt
    assert role.read_config(TrainerConfig).max_steps == 20
    assert role.stop_requested() is None
    assert role.versions.all_announced(attempt) == []
    role.set_role("trainer", "running")
    assert Watch(role.heartbeat("trainer"), 4, silence=9, standstill=9).problem() is None
    display = StepDisplay(run, attempt.start_step, 20)
    servers = ServerList(["http://configured"], run.servers)
    assert servers.read()[0].startswith("http://")
    snapshot = start.folder and start.folder / "orchestrator" / "ledger.sqlite"
    ledger = Ledger(
        run.ledger, LedgerRun(**{**asdict(LEDGER_RUN), "branch": attempt.branch}), snapshot, start.step
    )
    account = Account(run.history.path, (run.metrics.rows() or [None])[-1])
    step = start.step + 1
    if (batch := role.batch(attempt, step)) is None:  # it was damaged, and is made again
        assert ledger.shipped(step) or step not in range(5, SHIPPED + 1) or ledger.waiting()
        batch = make_batch(step)
        batch.header = replace(batch.header, branch=attempt.branch)
        write_batch(batch_path(run.batches, step), batch)
    trained = ShippedBatches(run, attempt, config.batch_timeout).next_batch(step)
    assert trained.digest() == make_batch(step).digest()
    ledger.close()
    role.versions.folder(step).mkdir(parents=True)
    role.versions.announce(attempt, step, save=True, last=False)
    assert role.versions.all_announced(attempt) == [step]
    assert role.versions.announced(attempt, step) == Announcement(attempt.id, step, save=True, last=False)
    counts = {"step": step, "total_samples": step, "total_tokens": 3 * step}
    role.metrics.append({**counts, **account.after_step(0.0, 1.0)})
    display.update(final=True)
    assert display.step == step
    assert "goodput" in display.account()
    role.request_stop("SIGTERM")
    assert role.stop_requested() == "SIGTERM"
    role.forget_batches(start.step)
    apply_retention(start.store, config.ckpt)
    role.end_roles("done", "")
    with contextlib.suppress(CairnError):  # of what is beyond repair
        audit(path)
    run.unlock()
    return start.step


# Every file, and every way to damage it

FILES = [
    *("metrics.jsonl", "history.jsonl", "roles.json", "config.json", "recipe.json", "stop.json"),
    *("servers.json", "heartbeats/trainer.json", "weights/v5.json", "batches/step_5.safetensors"),
    *("checkpoints/pins.json", "checkpoints/step_4/manifest.json", "checkpoints/step_4/trainer/state.json"),
    *("logs", "heartbeats", "batches", "weights", "checkpoints"),
]


def torn(tenths: int) -> Callable[[bytes], bytes]:
    return lambda content: content[: len(content) * tenths // 10]


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    **{f"torn at {tenths}/10": torn(tenths) for tenths in (1, 5, 9)},
    "torn before the end": lambda content: content[:-2],
    "empty": lambda _: b"",
    "zeros": lambda content: bytes(len(content)),
    "garbage": lambda _: b"\xff\x00\x13\n\x80garbage",
    "a garbage line": lambda content: content.replace(b"\n", b"\n\xff{\n", 1) if b"}\n{" in content else b"x",
    "garbage in the middle": lambda content: (
        content[: len(content) // 2] + b"\n\xff{" + content[len(content) // 2 :]
    ),
    "nested": lambda _: b"[" * 100_000,
    **{text: lambda _, text=text: text.encode() for text in ("{}", "[]", "5", "[{}]\n{}")},
}
PLACES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(),
    "a folder": lambda path: (path.rename(f"{path}.aside"), path.mkdir(), (path / "mine").write_text("mine")),
    "a file": lambda path: (path.rename(f"{path}.aside"), path.write_text("mine")),
    "a link to it": lambda path: path.symlink_to(path.rename(path.parent.parent / f"{path.name}.elsewhere")),
    "a link to nothing": lambda path: (path.rename(f"{path}.aside"), path.symlink_to("/nowhere/at/all")),
    "a link to a folder": lambda path: (path.rename(f"{path}.aside"), path.symlink_to(path.parent.parent)),
}
OWN = {"roles.json", "config.json", "recipe.json", "trainer.json", "orchestrator.json"}
"""What is written anew for each attempt, if it is sound."""


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def assert_nothing_is_lost(before: dict[str, bytes], after: dict[str, bytes], step: int) -> None:
    """Whole files are still somewhere, lines too, but for what going on from `step` takes away."""
    kept = set(after.values())
    lines = {line for content in after.values() for line in content.split(b"\n")}
    for name, content in before.items():
        if re.search(r"weights.*/|ledger\.sqlite|stop\.json$", name):  # messages, and a database
            continue
        if Path(name).name in OWN and _is_sound(content):
            continue
        if ".jsonl" in name:
            for line in content.split(b"\n"):
                if line in lines or not line:
                    continue
                assert json.loads(line)["step"] > step, f"{name} lost {line!r}"
        elif not content or content in kept or "step_4" in name:  # which may be debris now
            continue
        else:
            raise AssertionError(f"{name} is lost: {content[:80]!r}")


def _is_sound(content: bytes) -> bool:
    """Whether it is a JSON object, and was replaced by a newer one."""
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(content), dict)
    return False


def damages(name: str) -> dict[str, Callable[[Path], object]]:
    """The ways in which this file or folder of a run can be damaged."""
    if "." not in name:
        return {how: damage for how, damage in PLACES.items() if how != "a folder"}
    contents = {
        how: lambda path, change=change: path.write_bytes(change(path.read_bytes()))
        for how, change in CONTENTS.items()
    }
    return contents | {how: damage for how, damage in PLACES.items() if how != "a file"}


@pytest.mark.slow
@pytest.mark.parametrize("name", draws.cases(FILES, "damaged files", 6))
def test_the_run_goes_on_or_says_what_is_wrong(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # how durable it all is does not matter here
    for number, (how, damage) in enumerate(damages(name).items()):
        parent = tmp_path / str(number)
        run = Path(shutil.copytree(made, parent / "run"))
        damage(run / name)
        before = contents(parent)
        try:
            step = expected(name, how)
            if step is None:
                with pytest.raises(CairnError, match=re.escape(str(run / name))):
                    go_on(run)
            else:
                assert go_on(run) == step
            assert_nothing_is_lost(before, contents(parent), 99 if step is None else step)
        except Exception as error:
            error.add_note(f"{name}: {how}")
            raise
        shutil.rmtree(parent)


def expected(name: str, how: str) -> int | None:
    """The step that the run goes on from; None if it refuses."""
    if name == "checkpoints":
        return {"missing": 0, "a link to it": 4, "a link to a folder": 0}.get(how)
    sound = (name, how) == ("checkpoints/step_4/manifest.json", "a link to it")
    return 2 if "step_4" in name and not sound else 4


def test_going_back_again_and_again_without_roles(made: Path, tmp_path: Path):
    """An attempt's number, which names branches and what is set aside, is never given twice."""
    run = RunDirectory(shutil.copytree(made, tmp_path / "run"))
    config = make_config(run.path, resume_step=2)
    numbers, branches = [1], {BRANCH}
    for _ in range(3):
        run.roles.unlink()
        store = CheckpointStore(run.checkpoints)
        start = choose_start(config, needs=PARTS)
        attempt = begin(run, config, start, plan_recipe(KINDS["trainer"], config, start), command="trainer")
        numbers.append(attempt.number)
        branches.add(attempt.branch)
        ledger = Ledger(tmp_path / f"{attempt.number}.sqlite", LEDGER_RUN, None, 0)
        save(store, ledger, 4)
        ledger.close()
    assert numbers == [1, 2, 3, 4]
    assert len(branches) == 4
    assert sorted(path.name for path in store.abandoned.iterdir()) == [
        "before_attempt_2",
        "before_attempt_3",
        "before_attempt_4",
    ]
    assert [event["number"] for event in run.history.rows() if event["event"] == "attempt"] == [1, 2, 3, 4]


def test_evaluations_of_policies_that_become_others_are_forgotten(made: Path, tmp_path: Path):
    """Batches 5 and 6 are there, so policies up to 6 are made again; with other settings, none after 4."""
    run = RunDirectory(shutil.copytree(made, tmp_path / "run"))
    store = CheckpointStore(run.checkpoints)

    def begin_again(**changed: object) -> tuple[list[int], list[str]]:
        config = make_config(run.path).model_copy(update=changed)
        start = choose_start(config, needs=PARTS)
        begin(run, config, start, plan_recipe(KINDS["trainer"], config, start), command="trainer")
        ledgers = sorted(path.name for path in run.evaluations.rglob("*_*"))
        assert ratings_in(store.root) == ratings_of(run.evals.rows())
        return [row["step"] for row in run.evals.rows()], ledgers

    run.evaluations.mkdir()
    note(store.root, ratings_of([]))
    begin_again()
    for step, branch in ((4, BRANCH), (5, BRANCH), (6, BRANCH), (7, BRANCH), (8, "branch_0")):
        run.evals.append({"step": step, "name": "a", "run_id": RUN, "branch": branch, "reward": 0.5})
    for name in ("a_step_6.sqlite", "a_step_7.sqlite", "a_step_7.sqlite-wal"):
        (run.evaluations / name).touch()
    run.evaluated("a").mkdir(parents=True)
    for step in (4, 5, 6, 7):
        (run.evaluated("a") / f"step_{step}.parquet").touch()
    note(store.root, ratings_of(run.evals.rows()))
    assert begin_again() == (
        [4, 5, 6, 8],
        ["a_step_6.sqlite", *(f"step_{step}.parquet" for step in (4, 5, 6))],
    )
    assert begin_again(optimizer=AdamWConfig(lr=0.5)) == ([4, 8], ["step_4.parquet"])


@contextlib.contextmanager
def no_space() -> Iterator[None]:
    """While this lasts no byte can be written to any file, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)


def test_a_disk_without_a_free_byte(made: Path, tmp_path: Path, capsys, caplog):
    """A run can't begin there, and says with which file; one that is at work goes on without its notes."""
    run = RunDirectory(shutil.copytree(made, tmp_path / "run"))
    config = make_config(run.path)
    start = choose_start(config, needs=PARTS)
    before = contents(run.path)
    with no_space():
        code = answer(lambda: begin(run, config, start, {}, command="trainer"))
    assert code == 1
    assert capsys.readouterr().err == f"error: {run.history.path}: File too large\n"
    assert {name: contents(run.path)[name] for name in before} == before
    with no_space():
        for _ in range(2):
            run.set_role("trainer", "failed")
            run.history.restart("trainer", step=5, reason="died", how="is started again")
    assert caplog.text.count("roles.json is not up to date from now on: File too large") == 1
    assert "history.jsonl lacks that" in caplog.text
