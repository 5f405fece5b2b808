"""The chaos harness, through the script that users run: seeds of it, and kills of ranks in each layout.

A commit has one of all of these, which its hash decides; with -m soak, all seeds run, and every layout goes
through every fault point. Each kind of disaster has tests of its own in test_fault_points.py,
test_restart.py, test_remote.py and test_durability.py.
"""

import json
import random
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import draws
import pytest
from families import make_model
from runs import CONFIGS, Server, Shell
from stores import s3_server
from tiny import write

from cairn.run.connections import free_port
from cairn.run.faults import ON_EACH_RANK, POINTS

pytestmark = pytest.mark.timeout(900)

SFT = ("sft", "@", f"{CONFIGS}/sft.toml")
RL = ("rl", "--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")
RL = (*RL, "--orchestrator.prompts-per-step", 4)
RL_ALONE = ("rl", "@", f"{CONFIGS}/rl.toml", "--orchestrator.prompts-per-step", 4)
KEEP = ("--ckpt.interval", 2, "--ckpt.keep-last", 2)
CAMPAIGNS = {
    # As root: another run's weights, a power cut, SIGTERM to all processes.
    "RL, power cut": (1870, 2, 1),
    # As root: its trainer is killed, a power cut, a disk that can only be read.
    "SFT, power cut": (1095, 0, 1),
    "RL, torn ledger": (1870, 1, 1),
    "RL, new": (draws.seed(__name__), 0, 6),
}
"""Seed, first run and number of runs."""
LAYOUTS = {
    "replicas": (4, ("replicas", 2)),
    "context": (2, ("parallel.context", 2)),
    "tensor": (2, ("parallel.tensor", 2)),
    "tensor, replicas": (4, ("parallel.tensor", 2, "replicas", 2)),
    "experts": (2, ("parallel.expert", 2)),
    "experts, replicas": (4, ("parallel.expert", 2, "replicas", 2)),
    "experts, context": (2, ("parallel.expert", 2, "parallel.context", 2)),
    "experts, tensor": (2, ("parallel.expert", 2, "parallel.tensor", 2)),
}
"""The ranks of the trainer, and how they are laid out."""
KILLS = [(kind, layout) for layout in LAYOUTS for kind in ("SFT", "RL")]
FREE = [one for one in KILLS if one[0] == "SFT" or "experts" not in one[1]]
"""Those that need no server of their own."""
DRAWN = random.Random(draws.seed(__name__)).choice(["RL, power cut", "SFT, power cut", *FREE])
"""What a commit has of all."""
FEW = 1
"""Fault points on the way of a run in a commit."""
ELSEWHERE = ("orchestrator.turn", "orchestrator.call", "trainer.rewind")
"""Points that these runs don't reach: test_killed_programs.py, tests/unit/test_rewinds.py."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("RL, power cut", marks=() if DRAWN == "RL, power cut" else pytest.mark.soak),
        pytest.param("SFT, power cut", marks=() if DRAWN == "SFT, power cut" else pytest.mark.soak),
        pytest.param("RL, torn ledger", marks=pytest.mark.soak),
        pytest.param("RL, new", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_runs_keep_their_promises_through_disasters(shell: Shell, request: pytest.FixtureRequest, name: str):
    """Short runs: of RL beside a server, of SFT."""
    (seed, first, runs), command = CAMPAIGNS[name], (*SFT, "--max-steps", 10)
    if name.startswith("RL"):
        url = ("--orchestrator.inference-url", request.getfixturevalue("server").url)
        command = (*RL, "--max-steps", 8, *url)
    arguments = ("--seed", seed, "--first", first, "--runs", runs, "--json", "--", *command, *KEEP)
    summary, output = strike(shell, *arguments, deadline=300 + 300 * runs)
    assert summary["runs"] == output.count("kept its promises") == runs
    assert sum(summary["kills"].values()) >= runs
    scores = [float(score) for score in re.findall(r"kept its promises, goodput (\S+)", output)]
    assert len(scores) == runs
    assert summary["goodput"] == pytest.approx(statistics.fmean(scores), abs=0.01)
    assert summary["goodput"] > 0


@pytest.mark.soak
def test_branches_keep_their_promises(shell: Shell, server: Server, tmp_path: Path):
    """Each of them, and the same ones are kept: the command dies as it records that, and before it a rank."""
    command = (*RL, "--orchestrator.inference-url", server.url, "--max-steps", 6, *KEEP)
    command += ("--branches.turn-steps", 4, "--branches.keep", "4:1", "--branches.window", 2)
    for name, rate in {"low": 1e-4, "high": 4e-4}.items():
        (tmp_path / f"{name}.toml").write_text(f"[trainer.optimizer]\nlr = {rate}\n")
        command += ("--branch", tmp_path / f"{name}.toml")
    faults = ("trainer.batch_read:kill@2", "branches.recorded:kill@2", "orchestrator.before_ship:kill@2")
    arguments = ("--seed", 0, "--runs", 1, "--json", "--faults", ",".join(faults), "--", *command)
    summary, output = strike(shell, *arguments, deadline=900)
    assert summary["missed"] == 0, output
    assert sum(summary["kills"].values()) == len(faults)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("kind", "layout", "points"),
    [
        *([(*DRAWN, FEW)] if DRAWN in KILLS else []),
        *(pytest.param(*one, None, marks=pytest.mark.soak) for one in KILLS),
    ],
)
def test_a_rank_killed_at_any_point_in_any_layout(
    shell: Shell, request: pytest.FixtureRequest, tmp_path: Path, kind: str, layout: str, points: int | None
):
    """And a writer, and the orchestrator: one after the other in one run, which arrives at the same bits.

    `points`: how many, which the commit decides; None: all that the run reaches.
    """
    ranks, how = LAYOUTS[layout]
    section, command = "trainer." if kind == "RL" else "", SFT
    if kind == "RL" and "experts" in layout:  # servers of other models are not shared with other tests
        command = (*RL_ALONE, "--inference.port", free_port())
    elif kind == "RL":
        command = (*RL, "--orchestrator.inference-url", request.getfixturevalue("server").url)
    command += (f"--{section}workers", ranks)
    command += tuple(value if isinstance(value, int) else f"--{section}{value}" for value in how)
    if "experts" in layout:
        command += ("--model.name", write(make_model("qwen3_moe", num_key_value_heads=2), tmp_path / "model"))
    faults = draw_faults(kind, ranks, points)
    # A pass that is waited for is one of the next two, and each fault sets the run back by two saves at most.
    command += ("--max-steps", 8 * len(faults) + 4, "--max-restarts", len(faults))
    command += ("--ckpt.interval", 2, "--ckpt.keep-last", 2, "--ckpt.memory-interval", 1)
    arguments = ("--seed", 0, "--runs", 1, "--json", "--faults", ",".join(faults), "--", *command)
    summary, output = strike(shell, *arguments, deadline=2400)
    assert summary["missed"] == 0, output
    assert sum(summary["kills"].values()) == len(faults)


def draw_faults(kind: str, ranks: int, number: int | None) -> list[str]:
    """Kills at all points that such a run reaches, or at some; which rank, and on which pass, is drawn."""
    there = ("save.", "commit.", "retention.", "memory.")
    if kind == "RL":
        there += ("trainer.", "publish.", "orchestrator.")
    reached = [point for point in POINTS if point.startswith(there) and point not in ELSEWHERE]
    reached = [point for point in reached if kind == "RL" or not point.startswith("orchestrator.")]
    chance = random.Random(draws.seed(f"{__name__} {kind} {ranks}"))
    chosen = reached if number is None else chance.sample(reached, number)
    # Of small tensors, of which several ranks have copies, the last of these ranks writes all.
    drawn = [chance.randrange(ranks) if point != "save.write" else ranks - 1 for point in chosen]
    struck = [f"#{rank}" if point in ON_EACH_RANK else "" for point, rank in zip(chosen, drawn, strict=True)]
    return [f"{p}:kill@{chance.randint(1, 2)}{rank}" for p, rank in zip(chosen, struck, strict=True)]


def strike(
    shell: Shell, *arguments: object, deadline: float, environment: Mapping[str, str] | None = None
) -> tuple[dict, str]:
    """Run the harness, which must find no violation; returns its summary and all its output."""
    page = shell.folder / "chaos.md"
    with shell.start("cairn", "chaos", "--page", page, *arguments, environment=environment) as harness:
        finished = harness.finish(deadline)
    assert finished.code == 0, finished.output
    summary = json.loads(finished.output.splitlines()[-1])
    assert summary["violations"] == []
    assert summary["proved"] > 0, "the last steps were taken again"
    said = page.read_text()
    assert "nothing was lost" in said
    assert said.count("kept its promises") == summary["runs"]
    return summary, finished.output


@pytest.mark.soak
def test_a_lost_machine(shell: Shell, tmp_path: Path):
    """Its run directory is deleted under it, and the uploader dies before it commits a step; seed 2286."""
    command = ("sft", "@", f"{CONFIGS}/sft.toml", "--data.batch-size", 192, "--max-steps", 12)
    remote = ("--ckpt.interval", 3, "--ckpt.remote", "s3://bucket/chaos")
    arguments = ("--seed", 2286, "--runs", 1, "--json", "--", *command, *remote)
    with s3_server(tmp_path) as environment:
        summary, _ = strike(shell, *arguments, deadline=300, environment=environment)
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
    finished = shell.run("cairn", "chaos", "--seed", 1, "--runs", 1, "--", *command)
    assert finished.code == 2, finished.output
    assert message in finished.output
