"""What the last lines of a run say of answers that failed, and when that is exit code 1."""

from pathlib import Path

import pytest

from cairn.config.orchestrator import OrchestratorConfig
from cairn.launch.exit_report import failures_of, refuse_too_many, tell
from cairn.orchestrator.environments.protocol import UNSCORED
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.directory import RunDirectory
from cairn.run.exits import RoleFailed
from cairn.run.messages import Attempt

ATTEMPT = Attempt("run", 1, "rl", 0, None, "branch_1")
KEY_ERROR = "environment 'mine': reward of problem {} raised KeyError: 'anser'; the answer was 'x'"
ROW = {"reward/mean": 0.1, "groups": 8, "groups/failed": 0, "rollouts/failed": 0}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two steps: ten answers of two problems have failed in one way, one in another, two are unscored."""
    run = RunDirectory(tmp_path)
    failed = [(problem, KEY_ERROR.format(problem)) for problem in (0, 3) for _ in range(5)]
    failed += [(4, "environment 'mine': reward of problem 4 raised OSError: gone")]
    failed += [(5, f"{UNSCORED}environment 'mine': None")] * 2
    rows = [
        {"step": 1, "place": place, "sample": 0, "problem": problem, "environment": "mine", "failed": reason}
        for place, (problem, reason) in enumerate(failed)
    ]
    KeptRollouts(run.rollouts).write(1, rows, ATTEMPT, 1.0)
    return run


def rows(**first: int) -> list[dict]:
    return [{"step": 1, **ROW, **first}, {"step": 2, **ROW}]


def test_one_line_a_reason_with_counts(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    seen = rows(**{"groups/failed": 3, "groups/unscored": 1, "rollouts/failed": 1})
    failures = tell(run, seen, OrchestratorConfig(), "outputs/rl")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "2 of 18 prompts (11 %) were given up: their answers failed",
        "1 failed answer left out of other prompts",
        "  environment 'mine': reward of problem N raised KeyError: 'anser': 10 answers, 2 problems",
        "  environment 'mine': reward of problem N raised OSError: gone: 1 answer, 1 problem",
        "1 prompt left out: the environment returned no reward (None)",
        "`rollouts outputs/rl --failed` lists them",
    ]
    with pytest.raises(RoleFailed, match=r"11 % of its prompts were given up, .*max_failed_share \(0.1\)"):
        refuse_too_many(failures, OrchestratorConfig())
    refuse_too_many(failures, OrchestratorConfig(max_failed_share=0.2))


def test_a_run_without_failures_says_nothing(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    refuse_too_many(tell(run, rows(), OrchestratorConfig(max_failed_share=0), "x"), OrchestratorConfig())
    assert capsys.readouterr().out == ""


def test_unscored_prompts_are_no_failures(run: RunDirectory):
    failures = failures_of(run, rows(**{"groups/failed": 8, "groups/unscored": 8}), 8)
    assert failures.share == 0
    assert failures.unscored == 8


def test_rows_of_earlier_versions_count_by_the_settings(tmp_path: Path):
    old = [{"step": 1, "reward/mean": 0.0, "groups/failed": 4}]
    assert failures_of(RunDirectory(tmp_path), old, 4).share == 0.5
