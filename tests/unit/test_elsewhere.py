"""Environments in processes of their own: killed, hung and wrong ones cost a try, and nothing else."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from clocks import LoopClock
from errands import Servers
from runs import REPOSITORY
from test_programs import complete, digest, runner

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments import (
    BadEnvironment,
    EnvironmentFailed,
    SingleTurn,
    ask,
    check_environment,
    make_environment,
    worker_process,
)

PID = int


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes can import the tests' modules."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))


def configuration(environment: str, further: dict[str, Any] | None = None, **args: Any) -> EnvironmentConfig:
    """The settings of an environment in a process of its own, with this interpreter."""
    about = {"environment": f"lonely:{environment}", "args": args, **(further or {})}
    return EnvironmentConfig(name="process", args=about)


def asked(settings: EnvironmentConfig, job: Callable[[SingleTurn], Coroutine], timeout: float = 120) -> Any:
    """What `job` comes to with calls of a single-turn environment."""
    config = OrchestratorConfig(environment=settings, reward_timeout=timeout)

    async def run() -> Any:
        with ask(make_environment(settings), config) as calls:
            assert isinstance(calls, SingleTurn)
            return await job(calls)

    return asyncio.run(run())


def gone(pid: PID) -> None:
    """Wait until a process has ended."""
    end = time.monotonic() + 120
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # reaped
            return
        if state == "Z":
            return
        assert time.monotonic() < end, f"process {pid} lives on"
        time.sleep(0.01)


async def process_of(calls: SingleTurn) -> PID:
    """The process that an environment is in."""
    (message,) = await calls.messages(0)
    return int(message["content"].split()[-1])


def test_an_environment_that_prints_answers_from_its_own_process():
    async def job(calls: SingleTurn) -> None:
        assert calls.problems == 3
        assert str(calls.identity).startswith("code ")
        assert await process_of(calls) != os.getpid()
        assert await calls.reward(1, "four") == (4.0, {})
        assert await calls.reward(1, "parts") == (2.5, {"good": 1.0, "long": 3.0})

    asked(configuration("Words"), job)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("raise", "reward of problem 1: KeyError: 'no such word'; the answer was 'raise'"),
        ("exit", "SystemExit: 3"),
        ("nothing", "unscored: environment 'process': reward of problem 1 returned None"),
        ("die", "the environment's process was killed by signal 9"),
    ],
)
def test_failures_have_reasons_and_the_next_call_is_answered(answer: str, why: str):
    async def job(calls: SingleTurn) -> None:
        with pytest.raises(EnvironmentFailed, match="environment 'process': ") as failed:
            await calls.reward(1, answer)
        assert why in str(failed.value)
        assert await calls.reward(1, "four") == (4.0, {})

    asked(configuration("Words"), job)


HANGING = """
from lonely import Words


class Hanging(Words):
    def reward(self, problem, answer):
        open(f"{self.log}-{answer}", "w").close()
        return super().reward(problem, answer)
"""


def test_a_process_that_hangs_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loop_clock: LoopClock
):
    """Nothing stops a thread: the process is killed once the deadline and the time to stop are over."""
    monkeypatch.setattr(worker_process, "SECONDS_TO_CANCEL", 0.1)
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'tests'}:{tmp_path}")

    def let_the_deadline_pass() -> None:
        """Once the process is at it: a call that it has not begun is just called off."""
        end = time.monotonic() + 120
        while not (tmp_path / "log-hang").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        loop_clock.add(1)

    async def job(calls: SingleTurn) -> None:
        pid = await process_of(calls)
        calls.calls.timeout = 0.1
        passing = asyncio.create_task(asyncio.to_thread(let_the_deadline_pass))
        with pytest.raises(EnvironmentFailed, match=r"has not returned within 0\.1 s"):
            await calls.reward(1, "hang")
        await passing
        calls.calls.timeout = 120
        await asyncio.to_thread(gone, pid)
        assert await calls.reward(1, "four") == (4.0, {})
        assert await process_of(calls) != pid

    settings = configuration("", {"environment": "hanging:Hanging"}, log=str(tmp_path / "log"))
    asked(settings, job)


def test_a_process_that_is_killed_is_asked_nothing_more(monkeypatch: pytest.MonkeyPatch):
    """Its threads may take a while to end, and until then it would take requests."""

    async def job(calls: SingleTurn) -> None:
        pid = await process_of(calls)
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda group, number: None)
            (process,) = calls.environment._workers._processes  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
            process.kill()
            assert process.dead
        assert await process_of(calls) != pid

    asked(configuration("Words"), job)


def test_a_process_that_can_not_be_started_again_is_a_failure_like_others(tmp_path: Path):
    """Its interpreter may be away for a while."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    async def job(calls: SingleTurn) -> None:
        with pytest.raises(EnvironmentFailed):
            await calls.reward(1, "die")
        python.rename(tmp_path / "away")
        with pytest.raises(EnvironmentFailed, match=r"can't be started again: .*No such file"):
            await calls.reward(1, "four")
        (tmp_path / "away").rename(python)
        assert await calls.reward(1, "four") == (4.0, {})

    asked(configuration("Words", {"python": str(python)}), job)


def test_processes_share_the_work_and_functions_run_one_at_a_time(tmp_path: Path):
    async def job(calls: SingleTurn) -> set[PID]:
        await asyncio.gather(*(calls.reward(0, "count") for _ in range(12)))
        return {await pid for pid in asyncio.as_completed([process_of(calls) for _ in range(4)])}

    log = str(tmp_path / "log")
    assert len(asked(configuration("Words", {"processes": 2}, log=log), job)) == 2
    assert Counter(Path(log).read_text().split()) == {"1": 12}


def test_coroutines_of_one_process_run_together():
    async def job(calls: SingleTurn) -> list[Any]:
        return await asyncio.gather(*(calls.reward(0, "") for _ in range(3)))

    found = asked(configuration("Waiting", {"at_once": 3}, together=3), job)
    assert found == [(1.0, {})] * 3


def test_a_program_whose_process_is_killed_at_every_step(tmp_path: Path):
    """Each step is taken once, each token sampled once, and what is learned is as undisturbed."""
    found, servers, folders = [], [], []
    for mortal in (False, True):
        (folder := tmp_path / str(mortal)).mkdir()
        environment = make_environment(configuration("Strolls", folder=str(folder), mortal=mortal))
        servers.append(Servers())
        found.append(complete(runner(folder / "run", environment, servers[-1], reward_retries=20)))
        folders.append(folder)
    calm, stormy = found
    assert len(list(folders[1].glob("died-*"))) == 2 * 3
    assert [rollout.failed for rollout in stormy.rollouts] == [None, None]
    assert digest(stormy) == digest(calm)
    assert [rollout.parts for rollout in stormy.rollouts] == [rollout.parts for rollout in calm.rollouts]
    assert [rollout.diverged for rollout in stormy.rollouts] == [0, 0]
    assert Counter(seed for seed, _ in servers[1].asked) == Counter(seed for seed, _ in servers[0].asked)
    visits = [Counter((folder / "visits").read_text().splitlines()) for folder in folders]
    assert visits[0] == visits[1]
    assert set(visits[1].values()) == {1}


def test_the_same_program_here_and_elsewhere(tmp_path: Path):
    """It learns the same from the same."""
    from errands import Errands

    here = complete(runner(tmp_path / "here", Errands(4), Servers()))
    settings = EnvironmentConfig(
        name="process", args={"environment": "errands:Errands", "args": {"turns": 4}}
    )
    elsewhere = complete(runner(tmp_path / "elsewhere", make_environment(settings), Servers()))
    assert digest(elsewhere) == digest(here)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "process"])
def test_processes_end_with_the_process_that_asks(victim: str):
    """Whoever is killed; with all that they have started."""
    program = (
        "import asyncio, sys, time\n"
        "from cairn.config.orchestrator import EnvironmentConfig\n"
        "from cairn.orchestrator.environments import make_environment\n"
        "args = {'environment': 'lonely:Parent'}\n"
        "environment = make_environment(EnvironmentConfig(name='process', args=args))\n"
        "print(asyncio.run(environment.messages(0))[0]['content'], flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as asking:
        try:
            assert asking.stdout is not None
            child, pid = map(int, asking.stdout.readline().split())
            assert Path(f"/proc/{child}").exists()
            os.kill(asking.pid if victim == "orchestrator" else pid, signal.SIGKILL)
            gone(pid)
            gone(child)
        finally:
            asking.kill()


def test_processes_end_when_nobody_needs_the_environment():
    environment = make_environment(configuration("Words"))
    pid = int(asyncio.run(environment.messages(0))[0]["content"].split()[-1])
    del environment
    gone(pid)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"environment": "lonely:Demanding"}, "OSError: no sandbox is left"),
        ({"environment": "lonely:Nobody"}, "has no attribute 'Nobody'"),
        ({"environment": "nowhere:Words"}, "No module named 'nowhere'"),
        ({"environment": "words"}, "'words' is not module:Class"),
        ({"environment": "lonely:Untold"}, "its tool look can't be described: argument where has no type"),
        ({"environment": "lonely:Words", "python": "/no/python"}, "there is no such program"),
        ({"environment": "lonely:Words", "python": "/bin/true"}, "ended with exit code 0 before it had made"),
        ({"environment": "lonely:Late", "start_timeout": 0.1}, "was not made within 0.1 s"),
        ({"environment": "lonely:Words", "processes": 0}, "processes = 0: it must be at least 1"),
        ({"environment": "lonely:Words", "packages": "verifiers"}, "packages is a list"),
        ({"environment": "lonely:Words", "args": {"problems": {1}}}, "must be JSON"),
        ({"environment": "lonely:Words", "args": {"length": 1}}, "unexpected keyword argument 'length'"),
        ({"environment": "lonely:Words", "args": {"problems": 0}}, "it has no problems"),
        ({}, "missing 1 required positional argument: 'environment'"),
    ],
)
def test_wrong_settings(args: dict[str, Any], why: str):
    config = OrchestratorConfig(environment=EnvironmentConfig(name="process", args=args))
    with pytest.raises(BadEnvironment) as bad:
        check_environment(config)
    assert why in str(bad.value)
    assert "orchestrator.environment" in str(bad.value)


def test_packages_need_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadEnvironment, match="packages needs uv, which is not on the PATH"):
        make_environment(EnvironmentConfig(name="verifiers", args={"taskset": "words"}))
