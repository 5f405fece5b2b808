"""Tasks of the real library verifiers. Runs where uv has it in its cache already, or finds it at once:

uv run --isolated --no-project --with verifiers==0.4.0 python -c ""
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from errands import Servers
from runs import REPOSITORY
from test_programs import complete, runner

from cairn.config.orchestrator import EnvironmentConfig
from cairn.orchestrator.environments import BadEnvironment, make_environment

UV = os.environ.get("UV") or shutil.which("uv") or "uv"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is there without a network."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    command = [
        UV,
        "run",
        "-q",
        "--isolated",
        "--no-project",
        "--with",
        "verifiers==0.4.0",
        "python",
        "-c",
        "",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=250)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("uv's cache has no verifiers 0.4.0")


def test_tasks_are_asked_and_scored(tmp_path: Path):
    settings = EnvironmentConfig(name="verifiers", args={"taskset": "word_tasks"})
    environment = make_environment(settings)
    assert len(environment) == 3
    servers = Servers()
    group = complete(runner(tmp_path / "run", environment, servers, samples_per_prompt=4))
    for rollout in group.rollouts:
        assert rollout.failed is None
        assert rollout.parts["tokens"] == len(rollout.token_ids)
        assert rollout.parts["whole"] == (0.5 if rollout.finish_reason == "stop" else 0.0)
        first = rollout.text.strip()[:1] == ("b", "d", "f")[group.problem]
        assert rollout.parts["first"] == float(first)
        assert rollout.reward == 2 * rollout.parts["first"] + rollout.parts["whole"]


def test_a_taskset_that_is_missing():
    with pytest.raises(BadEnvironment, match="'nowhere' not found"):
        make_environment(EnvironmentConfig(name="verifiers", args={"taskset": "nowhere"}))
