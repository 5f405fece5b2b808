"""A role that dies is started again alone, and the run ends as if nothing had happened."""

import os
import signal
from pathlib import Path

import pytest
from runs import (
    CONFIGS,
    Command,
    Server,
    Shell,
    assert_same_bits,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)

pytestmark = pytest.mark.timeout(900)


def kill(run: Path, role: str) -> int:
    """SIGKILL the process that roles.json names, which this test's command has started."""
    pid = read(run / "roles.json")["roles"][role]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_for_successor(command: Command, run: Path, role: str, pid: int) -> None:
    """Wait until another process has taken the role."""

    def taken() -> bool:
        entry = read(run / "roles.json")["roles"][role]
        return entry["pid"] != pid and entry["state"] == "running"

    command.wait_until(taken)


def test_reinforcement_learning_survives_its_trainer_and_its_orchestrator(
    shell: Shell, server: Server, trained: Path, tmp_path: Path
):
    """Both are killed in the middle; metrics, batches and weights come out to the bit, no step twice."""
    arguments = (
        *("rl", "--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml"),
        *("--model.name", step_folder(trained, 100), "--orchestrator.inference-url", server.url),
        *("--max-steps", 12, "--seed", 3, "--ckpt.interval", 4),
    )
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    shell.succeed(*arguments, "--output-dir", calm)
    with shell.start(*arguments, "--output-dir", stormy) as command:
        command.wait_until(lambda: len(rows(stormy)) >= 5)
        pid = kill(stormy, "trainer")
        wait_for_successor(command, stormy, "trainer", pid)
        command.wait_until(lambda: len(rows(stormy)) >= 7)
        pid = kill(stormy, "orchestrator")
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "trainer died (exit code -9) and is started again" in finished.output
    assert "orchestrator died (exit code -9) and is started again" in finished.output
    assert untimed(whole_rows(stormy, 12)) == untimed(whole_rows(calm, 12))
    assert steps(stormy) == steps(calm) == [4, 8, 12]
    assert '"ok": true' in shell.succeed("ckpt", "audit", stormy, "--json")
    for step in steps(calm):
        assert_same_bits(tensors(step_folder(stormy, step)), tensors(step_folder(calm, step)))


def test_fine_tuning_survives_its_trainer_and_a_worker(shell: Shell, trained: Path, tmp_path: Path):
    """The driver is killed, then a Ray worker; what they did since then is done again, to the bit."""
    run = tmp_path / "run"
    arguments = ("--ckpt.interval", 10, "--max-steps", 60, "--output-dir", run)
    with shell.start("sft", "@", f"{CONFIGS}/sft.toml", *arguments) as command:
        command.wait_until(lambda: len(rows(run)) >= 23)
        pid = kill(run, "trainer")
        wait_for_successor(command, run, "trainer", pid)
        command.wait_until(lambda: len(rows(run)) >= 41)
        (worker,) = command.workers()
        os.kill(worker, signal.SIGKILL)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert finished.output.count("is started again") == 2, finished.output
    assert untimed(whole_rows(run, 60)) == untimed(rows(trained)[:60])
    assert '"ok": true' in shell.succeed("ckpt", "audit", run, "--json")
