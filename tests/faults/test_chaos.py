"""A seed of the chaos harness, through the script that users run, of RL or SFT; with -m soak, all of them.

Each kind of disaster has tests of its own in test_fault_points.py, test_restart.py, test_remote.py and
test_durability.py.
"""

import json
import re
import statistics
from pathlib import Path

import draws
import pytest
from runs import CONFIGS, Shell
from stores import s3_server

pytestmark = pytest.mark.timeout(900)

RL = ("rl", "--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")
RL = (*RL, "--orchestrator.prompts-per-step", 4, "--max-steps", 8)
SFT = ("sft", "@", f"{CONFIGS}/sft.toml", "--max-steps", 10)
LAYOUTS = {
    "SFT, power cut": (),
    **{f"SFT, {axis}": ("--workers", 2, f"--parallel.{axis}", 2) for axis in ("context", "tensor")},
}
CAMPAIGNS = {
    # As root: another run's weights, a power cut, SIGTERM to all processes.
    "RL, power cut": (1870, 2, 1),
    # As root: its trainer is killed, a power cut, a disk that can only be read.
    **dict.fromkeys(LAYOUTS, (1095, 0, 1)),
    "RL, torn ledger": (1870, 1, 1),
    "RL, new": (draws.seed(__name__), 0, 6),
}
"""Seed, first run and number of runs."""
IN_A_COMMIT = draws.cases(["RL, power cut", *LAYOUTS], __name__, 1)


@pytest.mark.parametrize(
    "name",
    [
        *IN_A_COMMIT,
        pytest.param("RL, torn ledger", marks=pytest.mark.soak),
        pytest.param("RL, new", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_runs_keep_their_promises_through_disasters(shell: Shell, request: pytest.FixtureRequest, name: str):
    """Short runs: of RL beside a server, of SFT also on ranks that share rows or layers."""
    (seed, first, runs), command = CAMPAIGNS[name], (*SFT, *LAYOUTS.get(name, ()))
    if name.startswith("RL"):
        command = (*RL, "--orchestrator.inference-url", request.getfixturevalue("server").url)
    command = (*command, "--ckpt.interval", 2, "--ckpt.keep-last", 2)
    arguments = ("scripts/chaos.py", "--seed", seed, "--first", first, "--runs", runs, "--json")
    with shell.start("python", *arguments, "--", *command) as harness:
        finished = harness.finish(300 + 300 * runs)
    assert finished.code == 0, finished.output
    summary = json.loads(finished.output.splitlines()[-1])
    assert summary["violations"] == []
    assert summary["runs"] == finished.output.count("kept its promises") == runs
    assert sum(summary["kills"].values()) >= runs
    scores = [float(score) for score in re.findall(r"kept its promises, goodput (\S+)", finished.output)]
    assert len(scores) == runs
    assert summary["goodput"] == pytest.approx(statistics.fmean(scores), abs=0.01)
    assert summary["goodput"] > 0


@pytest.mark.soak
def test_a_lost_machine(shell: Shell, tmp_path: Path):
    """Its run directory is deleted under it, and the uploader dies before it commits a step; seed 2286."""
    command = ("sft", "@", f"{CONFIGS}/sft.toml", "--data.batch-size", 192, "--max-steps", 12)
    remote = ("--ckpt.interval", 3, "--ckpt.remote", "s3://bucket/chaos")
    arguments = ("scripts/chaos.py", "--seed", 2286, "--runs", 1, "--json", "--", *command, *remote)
    with s3_server(tmp_path) as environment:
        with shell.start("python", *arguments, environment=environment) as harness:
            finished = harness.finish(300)
        assert finished.code == 0, finished.output
        summary = json.loads(finished.output.splitlines()[-1])
        assert summary["violations"] == []
        assert summary["kills"] == {"fault remote.before_manifest": 1, "machine_lost disk": 1}
        left = [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
        assert left == [], "the harness has deleted what it had uploaded"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sft", "@", f"{CONFIGS}/sft.toml"], "--ckpt.interval"),
        (["sft", "@", "nowhere.toml", "--ckpt.interval", "2"], "nowhere.toml"),
        (["inference"], "must be sft, rl"),
    ],
)
def test_a_command_that_can_not_be_disturbed(shell: Shell, command: list[str], message: str):
    """Exit code 2, and why."""
    finished = shell.run("python", "scripts/chaos.py", "--seed", 1, "--runs", 1, "--", *command)
    assert finished.code == 2, finished.output
    assert message in finished.output
