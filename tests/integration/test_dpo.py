"""`dpo` from the outside: a run whose trainer is killed is as if it never was."""

from pathlib import Path

import pytest
from runs import CONFIGS, Shell, assert_same_bits, rows, step_folder, tensors, untimed, whole_rows

pytestmark = pytest.mark.timeout(900)

FAULTS = ("reference.written:kill", "commit.done:kill")


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
