"""Branches of a run at one server: the command and the server are killed, and the user ends a branch."""

import os
import signal
from pathlib import Path

import draws
import psutil
import pytest
from runs import (
    CONFIGS,
    Server,
    Shell,
    assert_same_bits,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)

from cairn.run.branches import Branches
from cairn.run.connections import free_port

pytestmark = pytest.mark.timeout(900)

RATES = {"low": 1e-4, "high": 4e-4, "wild": 4e-2}


def of_branch(run: Path) -> list[dict]:
    """The rows of a run, without times, and without whose the answers were."""
    return [
        {key: value for key, value in row.items() if key != "rollouts/shared"} for row in untimed(rows(run))
    ]


@draws.in_turn("branches of a run", 0, 2)
def test_branches_end_as_they_would_alone(shell: Shell, server: Server, trained: Path, tmp_path: Path):
    """The command and its server are killed; the best branch has the bits of a run without the others."""
    for name, rate in RATES.items():
        (tmp_path / f"{name}.toml").write_text(f"[trainer.optimizer]\nlr = {rate}\n")
    rl = ("rl", "@", f"{CONFIGS}/rl.toml", "--model.name", step_folder(trained, 200), "--ckpt.interval", 2)
    rl += ("--orchestrator.prompts-per-step", 4, "--max-steps", 6)
    together = (*rl, "--output-dir", tmp_path / "all", "--inference.port", free_port())
    together += ("--branches.turn-steps", 4, "--branches.keep", "4:1", "--branches.window", 2)
    together += tuple(word for name in RATES for word in ("--branch", tmp_path / f"{name}.toml"))
    branches = Branches(tmp_path / "all")
    low, high, wild = map(branches.run, RATES)

    going_on = ("--", *together, "--ckpt.resume", "auto")
    struck = shell.run("cairn", "chaos", "--folder", tmp_path / "chaos", *going_on)
    assert "error: the command must not have --ckpt.resume" in struck.output
    assert not branches.path.exists(), "a dry run has looked at each of them, and written nothing"

    with shell.start(*together) as command:
        command.wait_until(lambda: len(rows(high)) >= 2)
        command.family()
        command.process.send_signal(signal.SIGKILL)
        command.finish()
        command.assert_nothing_survives()
    before = of_branch(low)
    assert steps(low) == [2, 4]
    refused = shell.run(*together)
    assert refused.code == 2
    assert "there are the branches low, high, wild; go on with --ckpt.resume auto" in refused.output

    with shell.start(*together, "--ckpt.resume", "auto") as command:
        command.wait_until(lambda: rows(wild))
        os.kill(server_of(command.process.pid), signal.SIGKILL)
        ended = shell.succeed("cairn", "branches", branches.path, "--end", "wild", "--reason", "too wild")
        assert "too wild" in ended
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 0, finished.output
    ready = (branches.logs / "inference.log").read_text().count("inference ready at")
    assert ready == 3, "once for each command, and once more since it was killed"
    states = branches.states()
    assert [choice.step for choice in states.choices] == [4]
    assert states.ended["wild"].reason == "too wild"
    (best,) = states.going_on
    assert set(states.choices[0].scores) == {"low", "high"}
    kept, other = (branches.run(best), low if best == "high" else high)
    assert f"branch {best} is done: step 6" in finished.output
    assert of_branch(low)[:4] == before
    assert len(whole_rows(kept, 6)) == 6
    assert len(whole_rows(other, 4)) == 4
    assert steps(wild)[-1] == len(rows(wild)) <= 4, "it has saved its step and stopped there"
    for run in (low, high, wild):
        audited = shell.succeed("ckpt", "audit", run)
        assert "no violation" in audited
        assert ("prompts took the answers that branch low had sampled" in audited) == (run != low)
    assert [row["rollouts/shared"] for row in rows(high)[:2]] == [32, 0]
    assert "the branch ends: after step 4" in (other / "stop.json").read_text()

    alone = tmp_path / "alone"
    shell.succeed(
        *(*rl, "@", tmp_path / f"{best}.toml", "--output-dir", alone),
        *("--orchestrator.inference-url", server.url),
    )
    assert of_branch(alone) == of_branch(kept)
    assert_same_bits(tensors(step_folder(alone, 6)), tensors(step_folder(kept, 6)))


def server_of(command: int) -> int:
    """The process that holds the server which a command has started."""
    children = psutil.Process(command).children()
    return next(child.pid for child in children if "cairn.inference.supervised" in child.cmdline())
