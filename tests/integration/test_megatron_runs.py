"""Runs that real megatron-core trains: of ranks that Ray starts, beside a server, and through a death."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from runs import (
    CONFIGS,
    Server,
    Shell,
    assert_same_bits,
    read,
    rows,
    step_folder,
    tensors,
    untimed,
    whole_rows,
)

pytest.importorskip("megatron.core", reason="install the dependency group megatron")

pytestmark = pytest.mark.timeout(900)
STAGES = ("--backend", "megatron", "--workers", 3, "--parallel.pipeline", 3, "--activation-checkpointing")
"""The example's model has three layers."""
REFERENCE = ("--trainer.kl.coef", 0.1, "--trainer.kl.reference", "start")
FILES = ("--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")


def test_stages_train_as_one_rank_does_and_survive_the_death_of_one(shell: Shell, tmp_path: Path):
    """The run whose last stage dies is the same to the bit as one that goes through; one that FSDP2 trains is
    the same up to rounding, and each goes on as the other."""
    command = ("sft", "@", f"{CONFIGS}/sft.toml", "--ckpt.interval", 5)
    whole, stormy, plain = (tmp_path / name for name in ("whole", "stormy", "plain"))
    shell.succeed(*command, *STAGES, "--output-dir", whole, "--max-steps", 20)
    with shell.start(*command, *STAGES, "--output-dir", stormy, "--max-steps", 20) as running:
        running.wait_until(lambda: len(rows(stormy)) >= 7)
        os.kill(read(stormy / "roles.json")["roles"]["trainer_rank2"]["pid"], signal.SIGKILL)
        finished = running.finish()
    assert finished.code == 0, finished.output
    assert "started again" in finished.output
    assert untimed(whole_rows(stormy, 20)) == untimed(whole_rows(whole, 20))
    assert_same_bits(tensors(step_folder(stormy, 20)), tensors(step_folder(whole, 20)))
    shell.succeed(*command, "--output-dir", plain, "--max-steps", 20)
    for ours, right in zip(rows(whole), rows(plain), strict=True):
        assert ours["loss"] == pytest.approx(right["loss"], rel=1e-3)
        assert ours["samples"] == right["samples"]
    shell.succeed(*command, "--output-dir", whole, "--max-steps", 22, "--ckpt.resume", "auto")
    shell.succeed(*command, *STAGES, "--output-dir", plain, "--max-steps", 22, "--ckpt.resume", "auto")
    assert rows(whole)[-1]["loss"] == pytest.approx(rows(plain)[-1]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("how", "ranks", "way"),
    [
        ("pipeline", 3, ("--trainer.weight-transport", "network", *REFERENCE)),
        ("tensor", 2, ()),
        ("tensor", 2, ("--trainer.weight-transport", "network", "--trainer.weight-encoding", "delta")),
    ],
)
def test_a_server_gets_the_policies_that_several_ranks_train(
    shell: Shell, server: Server, trained: Path, tmp_path: Path, how: str, ranks: int, way: tuple[str, ...]
):
    """What it finds of each token is what the trainer finds, so it has the trainer's weights. A reference
    that FSDP2 has on the same ranks is what the policy was."""
    run = tmp_path / "run"
    shell.succeed(
        *("rl", *FILES, "--model.name", step_folder(trained, 200), "--output-dir", run),
        *("--trainer.backend", "megatron", "--trainer.workers", ranks, f"--trainer.parallel.{how}", ranks),
        *way,
        *("--orchestrator.inference-url", server.url, "--max-steps", 4, "--ckpt.interval", 4),
    )
    found = whole_rows(run, 4)
    assert all(row["mismatch/logprob"] < 1e-4 for row in found)
    assert all(row["grad_norm"] > 0 for row in found)
    if way[-4:] == REFERENCE:
        assert abs(found[0]["kl/reference"]) < 1e-6 < found[-1]["kl/reference"]
    before, after = (tensors(step_folder(run, 4)), tensors(step_folder(trained, 200)))
    name = "model/model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert json.loads(shell.succeed("ckpt", "audit", run, "--json"))["ok"]
