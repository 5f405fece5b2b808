"""The process that exports a run's steps dies, or nobody wants to wait for it: no export is lost or half."""

import fcntl
import signal
from pathlib import Path

import pytest
import torch
from runs import CONFIGS, Shell, read, rows, step_folder, steps
from safetensors.torch import load_file

from cairn.formats.transfer.export_folder import UNFINISHED
from cairn.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(900)

STEPS = [5, 10, 15, 20]
SFT = (
    *("sft", "@", f"{CONFIGS}/sft.toml", "--seq-len", 32, "--micro-batch-size", 2, "--data.batch-size", 8),
    *("--max-steps", STEPS[-1], "--ckpt.interval", 5, "--ckpt.keep-last", 1),
    *("--ckpt.export.dtype", "bfloat16", "--ckpt.export.max-waiting", len(STEPS)),
)


def assert_exported(run: Path) -> None:
    """Every step, whole, as bfloat16; and of the checkpoints only the newest stays."""
    assert sorted(path.name for path in (run / "exports").iterdir() if path.name[0] != ".") == sorted(
        f"step_{step}" for step in STEPS
    )
    assert steps(run) == STEPS[-1:]
    ours = load_file(run / "exports" / f"step_{STEPS[-1]}" / "model.safetensors")
    theirs = load_file(step_folder(run, STEPS[-1]) / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].to(torch.bfloat16)) for name in theirs)


def test_a_killed_exporter_is_started_again(shell: Shell, tmp_path: Path):
    """In the middle of a step. Training does not notice; retention keeps what waits meanwhile, and then
    deletes it."""
    run, once = tmp_path / "run", tmp_path / "once"
    once.mkdir()
    (once / "export.write:kill").touch()
    faults = {"CAIRN_FAULT": "export.write:kill", "CAIRN_FAULT_ONCE": str(once)}
    with shell.start(*SFT, "--output-dir", run, environment=faults) as command:
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 0, finished.output
    assert not list(once.iterdir())
    assert "exporter died (exit code -9) and is started again" in finished.output
    assert f"exported to {run / 'exports'}" in finished.output
    assert_exported(run)
    assert read(run / "roles.json")["roles"]["exporter"]["state"] == "done"
    assert {row["run/exports_waiting"] for row in rows(run)} > {0}
    restarts = [event for event in RunDirectory(run).history.rows() if event["event"] == "restart"]
    assert [event["role"] for event in restarts] == ["exporter"]


def test_a_stop_does_not_wait_for_exports(shell: Shell, tmp_path: Path):
    """The message says what is missing; the same command then finishes the exports of the complete run."""
    run = tmp_path / "run"
    with shell.start(*SFT, "--output-dir", run, "--ckpt.resume", "auto") as command:
        command.wait_until((run / "logs" / "exporter.log").exists)
        with open(run / "exports" / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # so that the exporter waits before its first step
            command.wait_until(
                lambda: read(run / "roles.json")["roles"].get("trainer", {}).get("state") == "done"
            )
            command.process.send_signal(signal.SIGTERM)
            finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 75, finished.output
    assert "stopped before all was exported" in finished.output
    assert f"step {STEPS[-1]}: not begun" in finished.output
    (run / "exports" / f"step_{STEPS[0]}{UNFINISHED}").mkdir()  # as one that is killed may leave
    again = shell.run(*SFT, "--output-dir", run, "--ckpt.resume", "auto")
    assert again.code == 0, again.output
    assert "the run is complete, but its exports are not" in again.output
    assert_exported(run)
