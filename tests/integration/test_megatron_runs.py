"""Runs that real megatron-core trains, of ranks that Ray starts, and through the death of one."""

import os
import signal
from pathlib import Path

import pytest
from runs import (
    CONFIGS,
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
STAGES = ("--backend", "megatron", "--workers", 3, "--parallel.pipeline", 3)
"""The example's model has three layers."""


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
