"""The first steps of Cairn and of TRL's trainers are the same to rounding (`scripts/test --peers`)."""

import json
import subprocess
import sys

import pytest
from runs import REPOSITORY

pytest.importorskip("trl", reason="TRL's trainers are compared with; it is in the group `bench`")
pytestmark = pytest.mark.timeout(1800)

EXPLAINED = {
    "grpo": 1e-2,  # TRL adds 1e-4 to the deviation that advantages are divided by
    "grpo, 2 mini-batches": 1.0,  # TRL divides by the mean number of tokens of all mini-batches
}
"""Where losses and gradients differ by more than rounding, and how far: the formulas below say why."""


def test_the_first_steps_are_those_of_trl():
    """Losses, gradients and rewards of four steps, of each kind of training, and the weights after them."""
    command = [sys.executable, "benchmarks/parity.py", "--quick", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["experiments"]
    assert list(found) == [
        *("sft", "dpo", "grpo", "grpo, unscaled", "grpo, 4 updates", "grpo, 4 updates, stored"),
        *("grpo, 4 updates, unclipped", "grpo, 2 mini-batches", "grpo, 2 mini-batches, own tokens"),
    ]
    for name, one in found.items():
        for metric, pairs in one["differences"].items():
            explained = EXPLAINED.get(name) if metric in ("loss", "grad_norm") else None
            assert pairs["cairn, trl"]["1"] < (explained or 1e-5), (name, metric)
            assert pairs["cairn, trl"]["2"] < (explained or 2e-4), (name, metric)
    assert found["grpo"]["loss with TRL's epsilon"] < 1e-6
    assert found["grpo"]["loss without"] < 1e-5
    assert found["grpo, 2 mini-batches"]["first loss by mean tokens"] < 1e-6
    assert found["grpo, 2 mini-batches, own tokens"]["first loss by own tokens"] < 1e-6
