"""Experts that servers chose survive the orchestrator's death, in the middle of a batch of a real run."""

from pathlib import Path

import families
import pytest
from runs import CONFIGS, Shell, read, whole_rows

from cairn.run.connections import free_port

pytestmark = pytest.mark.timeout(600)
STEPS = 2


def test_replayed_experts_survive_a_kill(tmp_path: Path):
    """With any others, the trainer's logprobs would not be the server's."""
    shell, run = Shell(tmp_path), tmp_path / "run"
    shell.environment |= {"CAIRN_FAULT": "orchestrator.finished_group:kill@5"}
    model = families.make("qwen3_moe", tmp_path / "model")
    output = shell.succeed(
        *("rl", "@", f"{CONFIGS}/rl.toml", "--model.name", model, "--output-dir", run),
        *("--trainer.router-replay", "true", "--max-steps", STEPS, "--inference.port", free_port()),
        *("--orchestrator.prompts-per-step", 4, "--orchestrator.samples-per-prompt", 4),
        *("--orchestrator.sampling.chunk-tokens", 4),  # so that answers are made in pieces
    )
    assert "orchestrator died (exit code -9) and is started again" in output
    for row in whole_rows(run, STEPS):
        assert 0.9 < row["experts/known"] < 1, "all but the last token of each sample"
        assert row["mismatch/logprob_max"] < 1e-4
    shown = read(run / "config.json")
    assert shown["orchestrator"]["router_replay"]
    assert shown["inference"]["return_experts"]
