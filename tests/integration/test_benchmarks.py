"""The benchmarks that train: they run, and print what they say. How fast is not a test's business."""

import importlib.util
import json
import subprocess
import sys

import pytest
from runs import REPOSITORY

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: uv sync --group bench"
)


def report(name: str) -> dict:
    """The object on the last line of a quick run."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_sft():
    found = report("sft")
    assert list(found["systems"]) == ["cairn", "bare", "trl_padded", "trl_packed"]
    rates = {name: values["tokens_per_s"] for name, values in found["systems"].items()}
    for name, values in found["systems"].items():
        assert values["rounds"] == [rates[name]]
        tokens = values["tokens_per_s"] * values["step_ms"] / 1000
        assert tokens == pytest.approx(64 * 11.5, rel=0.1), f"{name}: useful tokens of 64 records"
    for name in ("bare", "trl_padded", "trl_packed"):
        assert found["ratios"][f"cairn / {name}"] == pytest.approx(rates["cairn"] / rates[name])


def test_startup():
    found = report("startup")
    assert list(found["systems"]) == ["cairn", "trl", "bare"]
    times = {name: values["first_step_s"] for name, values in found["systems"].items()}
    assert min(times.values()) > 0
    for name in ("trl", "bare"):
        assert found["ratios"][f"cairn / {name}"] == pytest.approx(times["cairn"] / times[name])
