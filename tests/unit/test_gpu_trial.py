"""The GPU trial: what it makes of results. Its stages run on the CPU in tests/integration/test_gpus.py."""

import pytest
from runs import REPOSITORY


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch):
    """The script."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import gpu_trial

    return gpu_trial


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"step/one row/attention": "dense"}, "0.6b: step/one row/attention is 'dense', expected 'varlen'"),
        ({"step/dense/attention": "dense", "step/dense/waits": 9}, None),
        ({"step/four rows/waits": 4}, "0.6b: step/four rows/waits is 4, expected 0 to 3"),
        ({"step/one row/tokens/s": 9e3}, "tokens/s is 9000, expected 17000 to inf"),
        ({"step/compiled/peak over estimate": 1.14}, "peak over estimate is 1.14, expected 0.6 to 1.1"),
        ({"device/kernel varlen": None, "device/kernel flex": None}, None),
        ({"device/kernel varlen": "errs"}, "kernel varlen is 'errs', expected None"),
        ({"save/stall_s": 0.03, "resume/the bits are the same": True}, None),
        ({"resume/failed": "exit code 1: a trace"}, "resume/failed is 'exit code 1: a trace', expected None"),
    ],
)
def test_results_are_compared_with_what_is_expected(trial, found: dict[str, object], problem: str | None):
    on_h200 = {"0.6b: device/gpu": "NVIDIA H200", **{f"0.6b: {name}": value for name, value in found.items()}}
    problems = trial.problems_in(on_h200)
    assert len(problems) == (problem is not None)
    assert not problem or problem in problems[0]


def test_speeds_are_expected_of_known_gpus_only(trial):
    found = {"0.6b: step/one row/tokens/s": 100.0, "0.6b: step/one row/waits": 9}
    assert trial.problems_in(found | {"0.6b: step/gpu": "NVIDIA L4"}) == [
        "0.6b: step/one row/waits is 9, expected 0 to 3"
    ]
    assert len(trial.problems_in(found | {"0.6b: step/gpu": "NVIDIA H100 80GB HBM3"})) == 2
