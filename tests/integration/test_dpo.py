"""`dpo` and `reward` from the outside: a run whose trainer is killed is as if it never was."""

import math
from pathlib import Path

import draws
import pytest
from runs import CONFIGS, Shell, assert_same_bits, rows, step_folder, tensors, untimed, whole_rows
from transformers import AutoConfig

pytestmark = pytest.mark.timeout(900)

FAULTS = ("reference.written:kill", "commit.done:kill")


@draws.in_turn("killed on preferences", 0, 2)
def test_a_run_that_is_killed_is_as_if_it_never_was(shell: Shell, tmp_path: Path):
    """While the reference scores the records, and between two steps; the reference scores them once."""
    random = ("--model.name", f"{CONFIGS}/model", "--model.init-seed", 0)
    dpo = ("dpo", "@", f"{CONFIGS}/dpo.toml", *random, "--max-steps", 5, "--ckpt.interval", 3)
    shell.succeed(*dpo, "--output-dir", tmp_path / "straight")
    once = tmp_path / "once"
    once.mkdir()
    for fault in FAULTS:
        (once / fault).touch()
    faulty = {"CAIRN_FAULT": ",".join(FAULTS), "CAIRN_FAULT_ONCE": str(once)}
    with shell.start(*dpo, "--output-dir", tmp_path / "killed", environment=faulty) as command:
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert not list(once.iterdir())
    runs = [tmp_path / "straight", tmp_path / "killed"]
    expected, found = (untimed(whole_rows(run, 5)) for run in runs)
    assert found == expected
    assert_same_bits(*(tensors(step_folder(run, 5)) for run in runs))
    assert rows(runs[0])[-1]["rewards/margins"] > 0
    assert rows(runs[0])[-1]["total_samples"] == 5 * 32
    assert "no violation" in shell.succeed("ckpt", "audit", runs[1])


@draws.in_turn("killed on preferences", 1, 2)
def test_a_reward_model_that_is_killed_goes_on(shell: Shell, tmp_path: Path):
    """And the loss falls below that of a model that knows nothing, which is log 2."""
    reward = ("reward", "@", f"{CONFIGS}/reward.toml", "--max-steps", 6, "--ckpt.interval", 3)
    shell.succeed(*reward, "--output-dir", tmp_path / "straight")
    once = tmp_path / "once"
    once.mkdir()
    (once / FAULTS[1]).touch()
    faulty = {"CAIRN_FAULT": FAULTS[1], "CAIRN_FAULT_ONCE": str(once)}
    with shell.start(*reward, "--output-dir", tmp_path / "killed", environment=faulty) as command:
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert not list(once.iterdir())
    runs = [tmp_path / "straight", tmp_path / "killed"]
    expected, found = (untimed(whole_rows(run, 6)) for run in runs)
    assert found == expected
    assert_same_bits(*(tensors(step_folder(run, 6)) for run in runs))
    assert rows(runs[0])[-1]["loss"] < math.log(2) == pytest.approx(rows(runs[0])[0]["loss"], abs=1e-3)
    config = AutoConfig.from_pretrained(step_folder(runs[1], 6) / "model")
    assert (config.num_labels, config.architectures) == (1, ["Qwen3ForSequenceClassification"])
