"""`ckpt.metric` of an evaluation: what is refused before a run starts, and what the tools make of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from stores import make_step

from cairn.checkpoint.eval_metrics import RATINGS, note, ratings_of
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.main import ckpt
from cairn.launch.plan.settings import with_ratings
from cairn.remote import Objects
from cairn.run.errors import UsageError
from cairn.run.output import no_progress
from cairn.tools.ckpt_places import tier_for_copies

EVALS = [{"name": "held_out", "interval": 10, "samples": 4}]


def rl(metric: str, *, evals: list[dict] = EVALS, steps: int = 100, **more: object) -> RLConfig:
    rules = {"keep_best": 2, "metric": metric, "mode": "max", "interval": 5, **more}
    return RLConfig(ckpt=rules, orchestrator={"eval": evals}, max_steps=steps)


def test_rl_knows_the_interval_of_the_evaluation():
    """In every role; the metric of training needs none."""
    config = with_ratings(rl("eval/held_out/pass@4"))
    assert [c.ckpt.metric_interval for c in (config, config.trainer, config.orchestrator)] == [10] * 3
    assert config.ckpt.rated_by == "eval/held_out/"
    assert with_ratings(rl("loss")) == rl("loss")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (rl("eval/other/reward"), "there is no evaluation 'other'; the run has held_out"),
        (rl("eval/held_out/reward", evals=[]), r"there are no \[\[eval\]\] tables"),
        (rl("eval/held_out/pass@8"), "with samples = 4"),
        (rl("eval/held_out/reward", metric_interval=5), "has interval = 10; leave it out"),
        (rl("eval/held_out/reward", interval=7, steps=60), "no step before 70 is both"),
        (TrainerConfig(ckpt={"metric": "eval/a/reward"}), "give the interval of 'a', --ckpt.metric-interval"),
        (SFTConfig(ckpt={"metric": "eval/a/reward"}), "only RL runs evaluate"),
    ],
)
def test_what_is_refused_before_a_run_starts(config: RLConfig, message: str):
    with pytest.raises(UsageError, match=message):
        with_ratings(config)


@pytest.mark.parametrize("metric", ["eval/reward", "eval//reward", "eval/a/b/reward", "eval/a/"])
def test_names_that_no_evaluation_has(metric: str):
    with pytest.raises(ValidationError, match="must be eval/NAME/ and a number"):
        CkptConfig(metric=metric)
    with pytest.raises(ValidationError, match="is for a metric of an evaluation"):
        CkptConfig(metric="loss", metric_interval=3)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, arguments)])
        code, shown = ckpt(), capsys.readouterr()
        assert code == (2 if shown.err else 0)
        return shown.out + shown.err

    return run


def test_ckpt_lists_and_prunes_by_evaluations(tmp_path: Path, tool: Callable[..., str]):
    """Here and in an object store."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (2, 4, 6):
        make_step(store.root, step, {"a": b"1"})
    about = {"run_id": store.manifest(2).run_id, "branch": store.manifest(2).branch, "name": "held_out"}
    rewards = {2: 0.5, 4: 0.75, 6: 0.25}
    note(store.root, ratings_of([about | {"step": step, "reward": r} for step, r in rewards.items()]))
    metric = ("--metric", "eval/held_out/reward")
    listed = json.loads(tool("list", tmp_path / "run", "--json", *metric))
    assert {row["step"]: row["metrics"]["eval/held_out/reward"] for row in listed} == rewards
    assert "0.75" in tool("list", tmp_path / "run", *metric)
    other = ("--metric", "eval/b/reward")
    assert "no step has it; there are eval/held_out/reward" in tool("list", tmp_path / "run", *other)
    refused = tool("prune", tmp_path / "run", "--keep-best", 1, *other, "--mode", "max")
    assert "no step has it; metrics of evaluations here: eval/held_out/reward" in refused
    away = f"file://{tmp_path / 'away'}"
    for step in store.steps():
        tier_for_copies(away).take(store.folder(step), away, stage=no_progress)
    Objects(away).put(f"run/{RATINGS}", (store.root / RATINGS).read_bytes())
    tool("prune", tmp_path / "run", "--keep-best", 1, *metric, "--mode", "max")
    assert store.steps() == [4, 6]
    listed = json.loads(tool("list", away, "--json", *metric))
    assert {row["step"]: row["metrics"]["eval/held_out/reward"] for row in listed} == rewards
    tool("prune", away, "--keep-best", 1, *metric, "--mode", "max")
    assert [row["step"] for row in json.loads(tool("list", away, "--json"))] == [4, 6]
