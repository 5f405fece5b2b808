"""Processes that import before they are needed: a driver while its run is planned, and a raylet's workers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import CONFIGS, DEADLINE, REPOSITORY

from cairn.config.cli import load
from cairn.config.kinds import KINDS
from cairn.config.trainer import SFTConfig
from cairn.launch import early, main
from cairn.launch.ray import waiting
from cairn.launch.supervise.role_process import RoleProcess

# Workers


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Starts processes that wait and import next to nothing; this process is their driver."""
    monkeypatch.setattr(waiting, "PROGRAM", "waiting_program")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for name in ("GLOO_SOCKET_IFNAME", "GOMP_SPINCOUNT", waiting.ADDRESS):
        monkeypatch.delenv(name, raising=False)
    yield lambda count: waiting.start_waiting(count, "no folder", beside_servers=True)
    waiting.end_waiting()


def worker(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Start what a raylet starts; returns what the worker says of itself, whichever process that is."""
    environment = {**os.environ, "RAY_OF_THE_WORKER": "1"}
    out = tmp_path / "out"
    with open(out, "wb") as file:
        subprocess.run(
            [sys.executable, "-m", "waiting_program", *arguments],
            cwd=tmp_path, env=environment, stdout=file, check=True, timeout=DEADLINE,
        )  # fmt: skip
    end = time.monotonic() + DEADLINE
    while not out.read_bytes().endswith(b"\n"):
        assert time.monotonic() < end
        time.sleep(0.01)
    return json.loads(out.read_text())


def test_a_process_that_waits_is_the_worker(few: Callable[[int], None], tmp_path: Path):
    """It has the worker's arguments, environment, files and folder, and is the driver's child."""
    few(1)
    found = worker(tmp_path, "--worker-id=1", "x y")
    assert found["waited"]
    assert found["arguments"] == ["--worker-id=1", "x y"]
    assert found["folder"] == str(tmp_path)
    assert found["parent"] == os.getpid()
    assert found["session"] == os.getsid(0)
    environment = found["environment"]
    assert environment["RAY_OF_THE_WORKER"] == "1"
    assert environment["GOMP_SPINCOUNT"] == "5000"
    assert waiting.ADDRESS not in environment
    own = worker(tmp_path, "again")
    assert own["arguments"] == ["again"]
    assert not own["waited"]  # as nobody does any more


def test_a_worker_does_not_wait_for_the_dead(few: Callable[[int], None], tmp_path: Path):
    few(2)
    address = os.environ[waiting.ADDRESS]
    for process in waiting._waiting:
        process.kill()
        process.wait()
    assert not worker(tmp_path, "alone")["waited"]
    few(1)  # once is enough
    assert os.environ[waiting.ADDRESS] == address
    waiting.end_waiting()
    assert waiting.ADDRESS not in os.environ


@pytest.mark.parametrize(
    ("flags", "on_gpus", "count"),
    [
        ((), False, 1),
        (("--workers", "3"), False, 3),
        (("--workers", "2"), True, 0),
        (("--workers", "2", "--gpus", "0"), True, 2),
        (("--ray.address", "head:1"), False, 0),
    ],
)
def test_how_many_wait(flags: tuple[str, ...], on_gpus: bool, count: int):
    """On GPUs none does, as Ray assigns them by a variable that CUDA reads once."""
    config = load(SFTConfig, ["--model.name", "x", *flags])
    assert waiting.waiting_ranks(config, on_gpus=on_gpus) == count


# The driver


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[RoleProcess]:
    """All early processes that commands start."""
    found: list[RoleProcess] = []

    class Noted(RoleProcess):
        def __init__(self, *arguments: Any, **settings: Any):
            super().__init__(*arguments, **settings)
            found.append(self)

    monkeypatch.setattr(early, "RoleProcess", Noted)
    monkeypatch.chdir(REPOSITORY)
    return found


def test_a_refused_command_leaves_no_process_and_no_file(
    drivers: list[RoleProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    argv = ["sft", "@", f"{CONFIGS}/sft.toml", "--data.name", "nowhere.jsonl", "--output-dir", str(run)]
    monkeypatch.setattr("sys.argv", argv)
    assert main.sft() == 2
    (driver,) = drivers
    assert driver.exit_code is not None
    assert not Path(f"/proc/{driver.pid}").exists()
    assert not run.exists()


def test_what_needs_no_driver_starts_none(drivers: list[RoleProcess]):
    """Commands without a trainer, and those that name no model."""
    for command, config in (("sft", SFTConfig()), ("inference", object())):
        with early.early_driver(command, config) as driver:
            assert driver is None
    assert not drivers


def test_a_driver_that_died_early_has_no_role(drivers: list[RoleProcess], tmp_path: Path):
    """Another process is started then; the same if a run has had the driver already."""
    config = load(KINDS["sft"].config, ["--model.name", "x"])
    with early.early_driver("sft", config) as driver:
        driver.kill()
        assert not driver.take_up(tmp_path, tmp_path / "logs" / "trainer.log")
        assert not driver.take_up(tmp_path, tmp_path / "logs" / "trainer.log")
