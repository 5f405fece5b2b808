"""The public API: light to import, the checks of the commands, and what it reads of runs and checkpoints."""

import asyncio
import importlib.metadata
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import ABOUT, REPOSITORY
from safetensors.numpy import save

import cairn
from cairn.api import training
from cairn.checkpoint.store import CheckpointStore
from cairn.config.cli import load, load_branches
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.branches import Branches
from cairn.run.directory import RunDirectory
from cairn.run.files import write_json
from cairn.run.messages import Attempt, ShippedBatch
from cairn.run.waiting import run_async

CONFIG = REPOSITORY / "configs" / "reverse_text" / "sft.toml"


def commit(store: CheckpointStore, step: int) -> Path:
    """A step with one weight, its optimiser state and a trainer's state."""
    store.begin(step, ["model", "trainer"])
    weight = np.arange(6, dtype=np.float32).reshape(2, 3) + step
    files = {
        "model/model.safetensors": save({"a.weight": weight}),
        "trainer/optimizer.safetensors": save({"a.weight.exp_avg": -weight, "a.weight.step": weight[0]}),
        "trainer/state.json": json.dumps({"progress": {"step": step}}).encode(),
    }
    store.write_part(step, "files", files, "run:1")
    store.commit(step, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "metrics": {"loss": 1 / step}})
    return store.folder(step)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """An RL run that was killed after step 3, with the steps 1 and 2 saved in a folder of their own."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.begin(Attempt("run", 1, "rl", 0, None, "branch_1"))
    model = {"name": str(REPOSITORY / "configs" / "reverse_text" / "model")}
    write_json(run.config, {"max_steps": 9, "model": model, "ckpt": {"dir": str(tmp_path / "steps")}})
    for step in (1, 2, 3):
        run.metrics.append({"step": step, "loss": 1 / step})
    for step in (1, 2):
        commit(CheckpointStore(tmp_path / "steps"), step)
    return run


def test_importing_cairn_takes_no_time():
    """Of other packages none is imported before it is used."""
    code = (
        "import sys; before = set(sys.modules); import cairn; "
        "print(*{n.split('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "cairn\n"


def test_every_public_name_is_there_and_described():
    page = (REPOSITORY / "docs" / "reference" / "api.md").read_text()
    for name in [*cairn.__all__, "__version__"]:
        assert getattr(cairn, name) is not None
        assert f"cairn.{name}" in page or name == "Checkpoint"
    assert set(cairn.__all__) <= set(dir(cairn))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cairn.nothing  # noqa: B018


def test_data_frames_need_no_package_of_their_own():
    assert any(name.startswith("pandas") for name in importlib.metadata.requires("datasets") or [])


# Runs


def test_a_run_as_objects(run: RunDirectory):
    found = cairn.Run(run.path)
    assert (found.state, found.step) == ("killed", 3)
    assert repr(found) == f"<cairn.Run {str(run.path)!r}: killed, step 3>"
    assert list(found.metrics.index) == [1, 2, 3]
    assert found.metrics["loss"].tolist() == [1.0, 1 / 2, 1 / 3]
    assert [(step.number, step.metrics) for step in found.steps] == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert found.steps[0].nbytes == sum(p.stat().st_size for p in found.steps[0].folder.glob("*/*"))
    run.metrics.append({"step": 4, "loss": 0.0, "new": 1})
    assert found.metrics.loc[4, "new"] == 1
    assert found.metrics["new"].isna().sum() == 3


def test_a_run_that_has_not_begun_has_empty_metrics(run: RunDirectory):
    run.metrics.path.unlink()
    assert cairn.Run(run.path).metrics.index.name == "step"
    assert len(cairn.Run(run.path).metrics) == 0


def test_a_step_can_have_a_damaged_manifest(run: RunDirectory):
    (run.path.parent / "steps" / "step_1" / "manifest.json").write_text("{")
    first, second = cairn.Run(run.path).steps
    with pytest.raises(cairn.CairnError, match="step_1"):
        first.manifest  # noqa: B018
    assert second.load().step == 2


def test_what_is_no_run_directory_is_refused(run: RunDirectory, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")  # as in the folder of a model
    with pytest.raises(cairn.UsageError, match="is not a run directory"):
        cairn.Run(tmp_path)
    with pytest.raises(cairn.UsageError, match=r"cairn\.load_checkpoint"):
        cairn.Run(tmp_path / "steps" / "step_1")


def test_rollouts_are_what_the_ledger_holds(run: RunDirectory):
    """Whole answers only; of a batch that was shipped, and of a prompt that waits."""
    ledger = Ledger(run.ledger, LedgerRun("run", "branch_1", FORMAT, 0, 100, 1, 2, 1), None, 0)
    whole = Rollout(5, [7, 8], [-0.25, -0.5], [("run:branch_1:0", 0, 2)], "stop", "gh", 0.5)
    late = Rollout(6, [7], [-0.5], [("run:branch_1:0", 0, 1)], "length", "g", None)
    partial = Rollout(7, [9], [-0.5], [("run:branch_1:0", 0, 1)])
    for place, answers in enumerate(([whole, whole], [late, partial])):
        group = AnswerGroup(place, 10 + place, place, [4, 70, 71, 5], answers)
        ledger.issue(group)
        ledger.record(place, dict(enumerate(answers)))
    ledger.ship(ShippedBatch(1, [[0, 0]], 2, 4, "digest", 0), {0: 10})
    rows = cairn.Run(run.path).rollouts()
    assert rows["step"].isna().tolist() == [False, False, True]
    assert rows["reward"].isna().tolist() == [False, False, True]
    first = rows.iloc[0].dropna().to_dict()
    assert first.pop("prompt").startswith("<user>")
    assert first == {
        **{"step": 1, "place": 0, "problem": 10, "sample": 0, "text": "gh", "reward": 0.5},
        **{"finish_reason": "stop", "tokens": 2, "policy_step": 0},
    }
    ledger.fold(1)
    assert cairn.Run(run.path).rollouts()["text"].tolist() == ["g"]


def test_rollouts_of_a_damaged_or_missing_ledger(run: RunDirectory):
    with pytest.raises(cairn.UsageError, match="only RL runs have one"):
        cairn.Run(run.path).rollouts()
    run.ledger.write_bytes(b"nonsense" * 1000)
    with pytest.raises(cairn.CairnError, match="ledger is damaged"):
        cairn.Run(run.path).rollouts()


# Checkpoints


def test_a_checkpoint_in_memory(run: RunDirectory):
    checkpoint = cairn.load_checkpoint(run.path.parent / "steps" / "step_2")
    weight = torch.arange(6.0).reshape(2, 3) + 2
    assert checkpoint.step == 2
    assert torch.equal(checkpoint.tensors["a.weight"], weight)
    assert torch.equal(checkpoint.optimizer["a.weight"]["exp_avg"], -weight)
    assert torch.equal(checkpoint.optimizer["a.weight"]["step"], weight[0])
    assert checkpoint.trainer_state == {"progress": {"step": 2}}
    assert checkpoint.orchestrator_state == {}


def test_a_damaged_checkpoint_is_not_loaded(run: RunDirectory):
    path = run.path.parent / "steps" / "step_2" / "trainer" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(cairn.CairnError, match=r"optimizer\.safetensors"):
        cairn.load_checkpoint(run.path.parent / "steps" / "step_2")
    with pytest.raises(cairn.UsageError, match=r"no manifest\.json"):
        cairn.load_checkpoint(run.path)


# Training


def checked(config: object, **settings: object) -> SFTConfig:
    return training._checked(SFTConfig, config, settings, needs=("model.name", "data.name"))


def test_settings_override_a_file_as_flags_do():
    config = checked(CONFIG, max_steps=7, ckpt=True, optimizer={"lr": 0.5}, **{"data.batch_size": 3})
    assert (config.max_steps, config.optimizer.lr, config.data.batch_size) == (7, 0.5, 3)
    assert config.optimizer.betas == (0.9, 0.98)  # the file's
    assert config.ckpt is not None
    assert checked(str(CONFIG), ckpt={"interval": 5}).ckpt.interval == 5
    assert checked(CONFIG, ckpt=False).ckpt is None


def test_a_dict_or_a_configuration_will_do():
    content = {"model": {"name": "m"}, "data": {"name": "d"}, "ckpt": {"interval": 5}}
    config = checked(content, ckpt={"keep_last": 2})
    assert (config.ckpt.interval, config.ckpt.keep_last) == (5, 2)
    assert content["ckpt"] == {"interval": 5}
    again = checked(config)
    assert again == config
    assert again is not config
    with pytest.raises(cairn.UsageError, match="set max_steps in the SFTConfig itself"):
        checked(config, max_steps=3)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (CONFIG, {"max_step": 20}, "did you mean max_steps?"),
        (CONFIG, {"max_steps": -1}, "max_steps: it is -1, but must be"),
        (CONFIG, {"ckpt": {"intervall": 3}}, 'did you mean ckpt={"interval": ...}?'),
        ({"model": {"name": "m"}}, {}, 'sft needs data={"name": ...}; sft --help lists all'),
        ("nowhere.toml", {}, "nowhere.toml: configuration file not found"),
        (3, {}, "config is a int"),
        (CONFIG, {"slurm": {"nodes": 2}}, "slurm: cairn.sft trains here; the command sft submits a job"),
    ],
)
def test_mistakes_are_refused_as_on_the_command_line(config: object, settings: dict, message: str):
    with pytest.raises(cairn.UsageError) as error:
        cairn.sft(config, **settings)
    assert message in str(error.value)


def test_shared_values_of_rl_are_given_once():
    config = CONFIG.with_name("rl.toml")
    with pytest.raises(cairn.UsageError, match="all roles share this value"):
        cairn.rl(config, trainer={"seed": 3})


LR: dict[str, Any] = {"trainer": {"optimizer": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        ({"a": {"max_steps": 4}, "b": {}}, "branch a: max_steps can't differ between branches"),
        ({"a": {"trainer": {"seed": 1}}, "b": {}}, "branch a: trainer.seed: all roles share this value"),
        ({"a": LR}, "branch a: one branch is no choice"),
        ({"a b": LR, "c": LR}, "the branch would be called 'a b'"),
        ({"a": {"trainer": {"workerz": 2}}, "b": LR}, "there is no such setting; did you mean"),
        (["nowhere.toml", "b.toml"], "nowhere.toml"),
        ("a.toml", "branch: it is a str: give a list of files, or a dict"),
        ({"a": LR, "b": {}}, "branch: branches take turns.*add ckpt"),
    ],
)
def test_branches_that_can_not_be(branch: Any, message: str, tmp_path: Path):
    """As on the command line, before anything is written."""
    with pytest.raises(cairn.UsageError, match=message):
        cairn.rl("configs/reverse_text/rl.toml", branch=branch, output_dir=str(tmp_path / "all"))
    assert not (tmp_path / "all").exists()
    with pytest.raises(cairn.UsageError, match=r"slurm: cairn\.rl trains here"):
        cairn.rl("configs/reverse_text/rl.toml", branch={"a": LR, "b": {}}, slurm={})
    with pytest.raises(cairn.UsageError, match="lie over a file or a dict"):
        cairn.rl(RLConfig(output_dir=str(tmp_path)), branch={"a": LR, "b": {}})


def test_branches_have_the_settings_that_the_command_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From dicts and files alike; what comes back are the runs that have begun."""
    asked: list[tuple[RLConfig, dict[str, RLConfig]]] = []

    def run_branches(config: RLConfig, each: dict[str, RLConfig]) -> int:
        asked.append((config, each))
        begun = RunDirectory(Branches(config.output_dir).run("a"))
        begun.path.mkdir(parents=True)
        begun.begin(Attempt("run", 1, "rl", 0, None, "branch_1"))
        return 0

    monkeypatch.setattr("cairn.launch.branches.turns.run_branches", run_branches)
    for name, lr in {"a": 1e-3, "b": 1e-4}.items():
        (tmp_path / f"{name}.toml").write_text(f"[trainer.optimizer]\nlr = {lr}\n")
    files, base = [tmp_path / "a.toml", tmp_path / "b.toml"], "configs/reverse_text/rl.toml"
    argv = ["@", base, "--output-dir", str(tmp_path / "all"), "--ckpt", "--max-steps", "4"]
    each = load_branches(RLConfig, argv, [str(file) for file in files])
    assert [own.trainer.optimizer.lr for own in each.values()] == [1e-3, 1e-4]
    for branch in (files, {"a": LR, "b": files[1]}):
        runs = cairn.rl(base, branch=branch, output_dir=str(tmp_path / "all"), ckpt=True, max_steps=4)
        assert asked.pop() == (load(RLConfig, argv), each)
        assert [(name, run.path) for name, run in runs.items()] == [("a", tmp_path / "all/branches/a")]
        shutil.rmtree(tmp_path / "all")


def test_a_run_needs_the_main_thread():
    """Other threads get no signals, so a run started there could not be stopped in good order."""
    caught: list[Exception] = []

    def call() -> None:
        try:
            training._call(lambda: 0)
        except cairn.UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_asynchronous_work_is_done_with_or_without_a_running_loop():
    """A notebook's cells run inside an event loop, where asyncio.run refuses to."""

    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def cell() -> str:
        return run_async(work())

    assert run_async(work()) == "MainThread"
    assert asyncio.run(cell()).startswith("event loop")
