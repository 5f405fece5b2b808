"""Adapters that a real server computes beside its model, with a killed run."""

import signal
from pathlib import Path

import draws
import pytest
from runs import CONFIGS, Shell, rows, step_folder, untimed, whole_rows
from safetensors.torch import load_file

from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(900)


def test_a_server_computes_adapters_beside_the_base(shell: Shell, trained: Path, tmp_path: Path):
    """Each policy is the trainer's; a killed run and its server, started again, go on to the bit."""
    port, run = free_port(), tmp_path / "run"
    arguments = (
        *("rl", "@", f"{CONFIGS}/rl.toml", "--model.name", step_folder(trained, 200), "--output-dir", run),
        *("--ckpt.interval", 2, "--inference.port", port, "--inference.dtype", "float32"),
        *("--orchestrator.prompts-per-step", 4),
        *("--trainer.lora.serve", "unmerged", "--trainer.lora.rank", 4, "--trainer.optimizer.lr", 3e-3),
    )
    with shell.start(*arguments, "--max-steps", 1000) as command:
        command.wait_until(lambda: len(rows(run)) >= 3)
        command.family()  # afterwards its processes have another parent
        command.process.send_signal(signal.SIGKILL)
        command.finish()
        command.assert_nothing_survives()
    before = rows(run)
    shell.succeed(*arguments, "--max-steps", len(before) + 2, "--ckpt.resume", "auto")
    found = whole_rows(run, len(before) + 2)
    assert untimed(found[: len(before)]) == untimed(before)
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in found)
    assert {row["servers/quarantined"] for row in found} == {0}
    assert "no violation" in shell.succeed("ckpt", "audit", run)

    version = RunDirectory(run).versions.folder(len(found))
    assert {path.name for path in version.glob("*.safetensors")} == {"adapter_model.safetensors"}
    adapter = load_file(version / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 1e-3 for name, tensor in adapter.items() if ".lora_B." in name)
    assert "Loaded new LoRA adapter" in (run / "logs" / "vllm.log").read_text()


@draws.in_turn("branches of a run", 1, 2)
def test_branches_train_adapters_side_by_side_at_one_server(shell: Shell, trained: Path, tmp_path: Path):
    """Each is answered from its own adapter, however far the other one's is away."""
    for name, rate in {"low": 3e-4, "high": 3e-2}.items():
        (tmp_path / f"{name}.toml").write_text(f"[trainer.optimizer]\nlr = {rate}\n")
    printed = shell.succeed(
        *("rl", "@", f"{CONFIGS}/rl.toml", "--model.name", step_folder(trained, 200), "--ckpt"),
        *("--output-dir", tmp_path / "all", "--max-steps", 4, "--orchestrator.prompts-per-step", 4),
        *("--inference.port", free_port(), "--trainer.lora.serve", "unmerged", "--trainer.lora.rank", 4),
        *("--branches.at-once", 2, "--branch", tmp_path / "low.toml", tmp_path / "high.toml"),
    )
    runs = [tmp_path / "all" / "branches" / name for name in ("low", "high")]
    began = [printed.index(f"branch {run.name}: steps 1 to 4") for run in runs]
    assert max(began) < printed.index(" | step 1/4"), "none waits for the other one's turn"
    low, high = (whole_rows(run, 4) for run in runs)
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in (*low, *high))
    assert low[0]["reward/mean"] == high[0]["reward/mean"]
    assert low[3]["reward/mean"] != high[3]["reward/mean"]
    for run in runs:
        assert "no violation" in shell.succeed("ckpt", "audit", run)
