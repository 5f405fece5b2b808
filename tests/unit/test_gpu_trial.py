"""The trial of a GPU and of a whole machine: what they make of results, and how parts are run.

Its stages run on the CPU in tests/integration/test_gpus.py.
"""

import json
from pathlib import Path

import draws
import pytest
from runs import REPOSITORY


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch):
    """The script."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import gpu_trial

    return gpu_trial


@pytest.mark.parametrize(
    ("found", "failed"),
    [
        ({"step/one row/attention": "dense"}, ("step/one row/attention", "'varlen'")),
        ({"step/dense/attention": "dense", "step/dense/waits": 9}, None),
        ({"step/four rows/waits": 4}, ("step/four rows/waits", "at most 3")),
        ({"step/one row/tokens/s": 9e3}, ("step/one row/tokens/s", "at least 17000")),
        ({"step/compiled/peak over estimate": 1.14}, ("step/compiled/peak over estimate", "0.6 to 1.1")),
        ({"step/four rows/waits": "none"}, ("step/four rows/waits", "at most 3")),
        ({"device/kernel varlen": None, "device/kernel flex": None}, None),
        ({"device/kernel varlen": "errs"}, ("device/kernel varlen", "None")),
        ({"save/stall_s": 0.03, "resume/the bits are the same": True}, None),
        ({"resume/loading takes, largest weights": 3.0}, ("resume/loading takes, largest weights", "1.5")),
        ({"resume/failed": "exit code 1: a trace"}, ("resume/failed", "None")),
    ],
)
def test_results_are_held_to_claims(trial, found: dict[str, object], failed: tuple[str, str] | None, capsys):
    on_h200 = {"0.6b: device/gpu": "NVIDIA H200", **{f"0.6b: {name}": value for name, value in found.items()}}
    checked = trial.checked_claims(trial.CLAIMS, on_h200)
    assert {claim["claim"] for claim in checked} <= {f"0.6b: {name}" for name in found}
    assert checked, "each result here has a claim"
    wrong = [claim for claim in checked if not claim["passes"]]
    assert trial.told(checked) == len(wrong) == (failed is not None)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(checked)
    if failed:
        assert wrong[0]["claim"] == f"0.6b: {failed[0]}"
        assert said[-1].startswith(f"FAIL: 0.6b: {failed[0]} is ")
        assert failed[1] in wrong[0]["expected"]


def test_a_claim_says_what_was_predicted(trial, capsys):
    found = {"0.6b: step/gpu": "NVIDIA H100 80GB HBM3", "0.6b: step/one row/tokens/s": 18700.0}
    (checked,) = trial.checked_claims(trial.CLAIMS, found)
    name = "0.6b: step/one row/tokens/s"
    assert checked == {
        **{"claim": name, "predicted": "30,000 to 43,000", "expected": "at least 17000"},
        **{"measured": 18700.0, "passes": True},
    }
    assert trial.told([checked]) == 0
    expected = f"pass: {name} is 1.87e+04, expected at least 17000; predicted 30,000 to 43,000\n"
    assert capsys.readouterr().out == expected


def test_speeds_are_expected_of_known_gpus_only(trial):
    found = {"0.6b: step/one row/tokens/s": 100.0, "0.6b: step/one row/waits": 9}
    checked = trial.checked_claims(trial.CLAIMS, found | {"0.6b: step/gpu": "NVIDIA L4"})
    assert [claim["claim"] for claim in checked] == ["0.6b: step/one row/waits"]
    assert len(trial.checked_claims(trial.CLAIMS, found | {"0.6b: step/gpu": "NVIDIA H100 80GB HBM3"})) == 2


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch):
    """The script for a whole machine."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import gpu_all

    return gpu_all


def part(whole, code: str, **changed: object):
    """A part whose command is Python code."""
    command = f'-c "{code}"'
    return whole.Part(
        **{"what": "", "command": command, "tiny": command, "minutes": 1, "needs": (), **changed}
    )


def run(whole, one, folder: Path) -> int:
    return whole.run("rl_files", one, folder, ["NVIDIA H100"], tiny=False)


@draws.seldom
def test_a_part_is_run_once_and_held_to_claims(whole, tmp_path: Path, capsys):
    idle = part(whole, "import json; print(json.dumps({'shapes': {'8b': {'rl': {'trainer_idle': 0.8}}}}))")
    assert run(whole, idle, tmp_path) == 1
    assert "FAIL: rl_files: shapes/8b/rl/trainer_idle is 0.8, expected at most 0.5" in capsys.readouterr().out
    found = json.loads((tmp_path / "rl_files.json").read_text())
    assert found["result"]["shapes"]["8b"]["rl"]["trainer_idle"] == 0.8
    assert run(whole, part(whole, "raise SystemExit(3)"), tmp_path) == 1, "it is not run again"
    assert "is there" in capsys.readouterr().out
    (tmp_path / "rl_files.json").unlink()
    assert run(whole, part(whole, "print('{}')"), tmp_path) == 0


def test_what_a_part_writes_is_its_result(whole, tmp_path: Path):
    """And claims that failed are no failure of the part."""
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.exit(1)"
    claim = {"claim": "a", "predicted": None, "expected": "1", "measured": 2, "passes": False}
    command = f"-c \"{code}\" {whole.OUT} '{json.dumps({'claims': [claim]})}'"
    assert run(whole, part(whole, "", command=command), tmp_path) == 1
    assert json.loads((tmp_path / "rl_files.json").read_text())["result"] == {"claims": [claim]}
    assert not (tmp_path / "rl_files.failed.json").exists()


@pytest.mark.parametrize(
    ("code", "changed", "why"),
    [
        ("raise SystemExit('no luck')", {}, "it ended with exit code 1; the end of "),
        ("import time; time.sleep(100)", {"minutes": 0.005}, "it did not end within 0.3 s"),
        ("print('nothing')", {}, "Expecting value"),
    ],
)
def test_a_part_that_fails_is_run_again(
    whole, tmp_path: Path, code: str, changed: dict[str, object], why: str
):
    assert run(whole, part(whole, code, **changed), tmp_path) == 1
    assert why in json.loads((tmp_path / "rl_files.failed.json").read_text())["failed"]
    assert not (tmp_path / "rl_files.json").exists()
    assert run(whole, part(whole, "print('{}')"), tmp_path) == 0
    assert not (tmp_path / "rl_files.failed.json").exists()


def test_what_a_machine_lacks_is_said(whole):
    assert whole.lack(whole.PARTS["rl_files"], 4) == "it needs 8 GPUs, and this machine has 4"
    assert whole.lack(part(whole, "", needs=("json", "no_such_thing")), 8) == "no_such_thing is not installed"
    assert whole.lack(part(whole, ""), 1) is None


def test_a_part_for_one_gpu_sees_the_first_one(whole, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,GPU-7")
    assert whole.visible(1) == "GPU-5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert whole.visible(2) == "0,1"


def test_commands_of_parts_are_ones_that_there_are(whole):
    """Their scripts, shapes and scenarios; that all scripts read their command lines is tested elsewhere."""
    for one in whole.PARTS.values():
        for command in (one.command, one.tiny):
            script, *flags = command.split()
            text = (REPOSITORY / script).read_text()
            for flag in flags:
                assert not flag.startswith("--") or f'"{flag}"' in text, f"{script} {flag}"
