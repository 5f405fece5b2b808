"""A whole run of a tiny model that calls tools, on a real server."""

import json
import os
import signal
from pathlib import Path

import pytest
from runs import Server, Shell, read, rows, step_folder, whole_rows

pytestmark = pytest.mark.timeout(900)

CALCULATOR = "configs/calculator"
PROMPTS, SAMPLES, STEPS = 4, 4, 3


def test_a_run_with_tools_survives_a_kill(shell: Shell, server: Server, tmp_path: Path):
    """The model has learned how calls are written, and vLLM's parser reads them."""
    demonstrated, run = tmp_path / "demonstrated", tmp_path / "run"
    what = ("--max-steps", 100, "--output-dir", demonstrated, "--ckpt")
    shell.succeed("sft", "@", f"{CALCULATOR}/sft.toml", *what)
    arguments = (
        *("rl", "@", f"{CALCULATOR}/rl.toml", "--model.name", step_folder(demonstrated, 100)),
        *("--output-dir", run, "--max-steps", STEPS, "--ckpt", "--orchestrator.inference-url", server.url),
        *("--orchestrator.prompts-per-step", PROMPTS, "--orchestrator.samples-per-prompt", SAMPLES),
    )
    with shell.start(*arguments) as command:
        command.wait_until(lambda: len(rows(run)) >= 1)
        os.kill(read(run / "roles.json")["roles"]["orchestrator"]["pid"], signal.SIGKILL)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "orchestrator died" in finished.output
    found = whole_rows(run, STEPS)
    assert all(row["rollout/turns"] > 1 for row in found), found
    assert all(row["rollout/tool_calls"] > 0 for row in found), found
    assert all(0 < row["mismatch/logprob_max"] < 1e-3 for row in found), found
    assert sum(row.get("rollouts/failed", 0) for row in found) == 0
    report = json.loads(shell.succeed("ckpt", "audit", run, "--json"))
    assert report["ok"], report
    assert sum(epoch["trained"] for epoch in report["epochs"]) == STEPS * PROMPTS
