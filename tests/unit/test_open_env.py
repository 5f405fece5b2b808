"""Environments on OpenEnv servers: the wire, servers that die, that are full, that refuse."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from errands import Servers
from runs import DEADLINE, REPOSITORY
from test_programs import CHAT, Power, complete, digest, runner

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.environments import (
    BadEnvironment,
    EnvironmentFailed,
    check_environment,
    make_environment,
    open_env,
)
from cairn.orchestrator.environments.open_env import OpenEnvServer, begin
from cairn.orchestrator.environments.worlds import WorldPrograms

ACTION = {"guess": "{answer}"}


class ServerProcess:
    """A server's process; one that was killed is started again on its port."""

    def __init__(self, folder: Path, **settings: Any):
        folder.mkdir(exist_ok=True)
        self.folder, self.settings, self.deaths = folder, settings, 0
        self.process = self.start()
        end = time.monotonic() + 120
        while not (folder / "port").exists():
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        self.settings["port"] = int((folder / "port").read_text())
        self.over = threading.Event()
        self.keeper = threading.Thread(target=self.keep, daemon=True)
        self.keeper.start()

    def start(self) -> "subprocess.Popen[bytes]":
        script = REPOSITORY / "tests" / "open_env_server.py"
        return subprocess.Popen([sys.executable, script, self.folder, json.dumps(self.settings)])

    def keep(self) -> None:
        while True:
            self.process.wait()
            if self.over.is_set():
                return
            self.deaths += 1
            self.process = self.start()

    def close(self) -> None:
        self.over.set()
        self.process.kill()
        self.keeper.join(60)
        self.process.kill()

    def environment(self, **args: Any) -> EnvironmentConfig:
        url = f"http://127.0.0.1:{self.settings['port']}"
        return EnvironmentConfig(name="openenv", args={"url": url, "action": ACTION, **args})

    def log(self) -> list[dict[str, Any]]:
        lines = (self.folder / "log").read_text().splitlines()
        return [json.loads(line) for line in lines if line != "full"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Any]:
    """Starts servers."""
    made: list[ServerProcess] = []

    def start(name: str = "server", **settings: Any) -> ServerProcess:
        made.append(ServerProcess(tmp_path / name, **settings))
        return made[-1]

    yield start
    for server in made:
        server.close()


def worlds(folder: Path, settings: EnvironmentConfig, model: Servers, **further: Any) -> ProgramRunner:
    """Runs the rollouts of an environment on a server."""
    environment = make_environment(settings)
    one = runner(folder, environment, model, **further)
    one.environment.close()
    config = OrchestratorConfig(environment=settings, **further)
    return ProgramRunner(
        one.config, WorldPrograms(environment, config), CHAT, model, one.ledger, one.versions
    )


def problems_of_three(**args: Any) -> dict[str, Any]:
    """The played ledger is one of three problems."""
    return {"problems": 3, "observation": "{said}", **args}


def test_an_episode(servers: Any, tmp_path: Path):
    """Rewards are added up; the answers to a problem have the same seed, and episodes of their own."""
    server = servers()
    settings = server.environment(**problems_of_three(system="guess", reset={"level": 2}))
    check_environment(OrchestratorConfig(environment=settings))
    (server.folder / "log").unlink()
    model = Servers()
    group = complete(worlds(tmp_path / "run", settings, model))
    log = server.log()
    resets = [message["data"] for message in log if message["type"] == "reset"]
    assert len({reset["seed"] for reset in resets}) == 1
    assert len({reset["episode_id"] for reset in resets}) == 2
    assert {reset["level"] for reset in resets} == {2}
    steps = [message["data"] for message in log if message["type"] == "step"]
    assert len(steps) == 2 * 3
    for rollout in group.rollouts:
        assert rollout.failed is None
        assert rollout.parts["invalid"] == 0
        assert rollout.reward == rollout.parts["reward"] > 0
        assert len(rollout.turns) == 3
    assert len(model.asked) >= 6


@pytest.mark.slow
def test_a_server_that_is_killed_at_every_step(servers: Any, tmp_path: Path):
    """Episodes are begun again on the next one; what is learned is as undisturbed, and sampled once."""
    calm, stormy = servers("calm"), servers("stormy", mortal=True)
    models, groups = (Servers(), Servers()), []
    for server, model in zip((calm, stormy), models, strict=True):
        settings = server.environment(**problems_of_three())
        groups.append(complete(worlds(server.folder / "run", settings, model, reward_retries=40)))
    assert len(list(stormy.folder.glob("died-*"))) == 2 * 3
    assert stormy.deaths >= 3
    assert [rollout.failed for rollout in groups[1].rollouts] == [None, None]
    assert digest(groups[1]) == digest(groups[0])
    assert [one.parts for one in groups[1].rollouts] == [one.parts for one in groups[0].rollouts]
    assert [rollout.diverged for rollout in groups[1].rollouts] == [0, 0]
    assert Counter(seed for seed, _ in models[1].asked) == Counter(seed for seed, _ in models[0].asked)


def test_an_orchestrator_that_is_interrupted_at_every_call(servers: Any, tmp_path: Path):
    """The episode is stepped through again, and what is learned is as undisturbed."""
    server = servers()
    settings = server.environment(**problems_of_three())
    calm_model, model = Servers(), Servers()
    calm = complete(worlds(tmp_path / "calm", settings, calm_model))
    deaths = 0
    while True:
        one = worlds(tmp_path / "run", settings, model)
        one.ledger.left = 0
        try:
            found = complete(one)
            break
        except Power:
            deaths += 1
    assert deaths >= 1 + 3 + 3
    assert digest(found) == digest(calm)
    assert {seed for seed, _ in model.asked} == {seed for seed, _ in calm_model.asked}


def test_a_server_that_does_something_else_the_second_time(servers: Any, tmp_path: Path):
    server = servers(mortal=True, seeded=False)
    settings = server.environment(**problems_of_three())
    group = complete(worlds(tmp_path / "run", settings, Servers(), reward_retries=3))
    for rollout in group.rollouts:
        assert "taken again after a restart, leads to something else than before" in str(rollout.failed)
    with pytest.raises(BadEnvironment, match="two resets with the same seed lead to different observations"):
        check_environment(OrchestratorConfig(environment=settings))


def test_a_full_server_is_waited_for(servers: Any, tmp_path: Path):
    server = servers(sessions=1)
    settings = server.environment(**problems_of_three())
    group = complete(worlds(tmp_path / "run", settings, Servers(), samples_per_prompt=3))
    assert [rollout.failed for rollout in group.rollouts] == [None] * 3
    assert "full" in (server.folder / "log").read_text()


def test_a_full_server_is_waited_for_so_long(servers: Any, tmp_path: Path):
    server = servers(sessions=0)
    settings = server.environment(**problems_of_three(wait=0.5))
    group = complete(worlds(tmp_path / "run", settings, Servers(), reward_retries=0))
    for rollout in group.rollouts:
        assert "has no free session: no session is left, for 0.5 s" in str(rollout.failed)


def test_a_server_that_is_full_when_a_run_begins_is_one(servers: Any, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    def at_once(server: OpenEnvServer, reset: Any) -> Any:
        waits.append(server.wait)
        return begin(replace(server, wait=0.0), reset)

    monkeypatch.setattr(open_env, "begin", at_once)
    settings = servers(sessions=0).environment(connect_timeout=DEADLINE)
    check_environment(OrchestratorConfig(environment=settings))
    assert waits == [DEADLINE]


def episode(server: ServerProcess, answer: str, **args: Any) -> tuple[str, Any, bool]:
    """What a single step of an episode leads to."""

    async def run() -> Any:
        environment: Any = make_environment(server.environment(**args))
        session, _ = await environment.start(0, 7)
        try:
            return await environment.step(session, answer)
        finally:
            await environment.close(session)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "args", "why"),
    [
        ("!", {}, r"answers EXECUTION_ERROR: no such move; the action was .* \(tell_errors = true"),
        ("5", {"action": {"guess": "{answer:int}"}}, "answers VALIDATION_ERROR: guess must be text"),
        ("nonsense", {}, "the server's answer to step is no observation: 'what\\?'"),
        ("a", {"observation": "{board}"}, "observation = '{board}' fails: .* has said, steps"),
    ],
)
def test_errors_fail_the_rollout(servers: Any, answer: str, args: dict[str, Any], why: str):
    with pytest.raises(EnvironmentFailed, match=why):
        episode(servers(), answer, **args)


def test_a_server_that_does_not_answer_fails_the_rollout(servers: Any):
    async def run() -> None:
        environment: Any = make_environment(servers().environment(message_timeout=DEADLINE))
        session, _ = await environment.start(0, 7)
        assert session._server.message_timeout == DEADLINE
        session._server = replace(session._server, message_timeout=0.5)  # which a start may take, too
        try:
            with pytest.raises(EnvironmentFailed, match=r"has not answered step within 0\.5 s"):
                await environment.step(session, "silence")
        finally:
            await environment.close(session)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "args", "said"),
    [
        ("!", {"tell_errors": True}, "Error: no such move"),
        ("x", {"action": {"guess": "{answer:int}"}}, "Error: the answer must be a whole number"),
        ("x", {"action": {"guess": "{answer:json}"}}, "Error: the answer must be JSON"),
        ("x", {"tag": "move"}, "Error: there is no <move>...</move> in the answer"),
    ],
)
def test_the_model_is_told_of_its_errors(servers: Any, answer: str, args: dict[str, Any], said: str):
    observation, rewards, done = episode(servers(), answer, **args)
    assert (observation, done) == (said, False)
    assert rewards.parts == {"reward": 0.0, "invalid": 1.0}
    assert rewards.weights == {"invalid": 0.0}


@pytest.mark.parametrize(
    ("answer", "args", "sent"),
    [
        (" ab\n", {}, {"guess": "ab"}),
        ("so <m>a</m> no <m>b</m>.", {"tag": "m"}, {"guess": "b"}),
        (
            "7",
            {"action": {"guess": "go {answer}!", "n": ["{answer:int}", 1]}},
            {"guess": "go 7!", "n": [7, 1]},
        ),
        ('"c"', {"action": {"guess": "{answer:json}"}}, {"guess": "c"}),
    ],
)
def test_how_answers_become_actions(servers: Any, answer: str, args: dict[str, Any], sent: dict[str, Any]):
    server = servers()
    observation, rewards, _ = episode(server, answer, **args)
    assert server.log()[-1] == {"type": "step", "data": sent}
    assert json.loads(observation)["said"].startswith(sent["guess"][::-1])
    assert rewards.parts["reward"] > 0


def test_an_episode_without_rewards_has_failed(servers: Any):
    with pytest.raises(EnvironmentFailed, match="no step of it had a reward"):
        episode(servers(turns=1, gives=False), "a")


def test_a_token_is_sent(servers: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER_TOKEN", "secret")
    environment: Any = make_environment(servers().environment(token_variable="SERVER_TOKEN"))
    assert environment._server.headers == {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"url": "localhost:8000"}, "url = 'localhost:8000': it must be the address of a server"),
        ({"url": "http://"}, "it must be the address of a server"),
        ({"url": "http://127.0.0.1:port"}, "it must be the address of a server"),
        ({"action": {}}, "it must be a table with the model's answer in it"),
        ({"action": {"guess": "answer"}}, "it must be a table with the model's answer in it"),
        ({"problems": 0}, "there must be at least one problem"),
        ({"connect_timeout": 0}, "connect_timeout = 0: it must be above 0"),
        ({"max_turns": 0}, "its max_turns is 0"),
        ({"token_variable": "NOT_SET"}, "no such environment variable is set"),
        ({"url": "http://127.0.0.1:1", "connect_timeout": 0.5}, "ws://127.0.0.1:1/ws can't be connected to"),
    ],
)
def test_wrong_settings(args: dict[str, Any], why: str):
    args = {"url": "http://127.0.0.1:1", "action": ACTION, **args}
    with pytest.raises(BadEnvironment) as bad:
        check_environment(OrchestratorConfig(environment=EnvironmentConfig(name="openenv", args=args)))
    assert why in str(bad.value)


def test_what_is_no_such_server(servers: Any):
    """A path that the server does not have, and a server that speaks HTTP alone."""
    url = f"http://127.0.0.1:{servers().settings['port']}/other"
    with pytest.raises(BadEnvironment, match="answers HTTP 404 to a WebSocket: is url that of an"):
        check_environment(OrchestratorConfig(environment=at(url)))
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
        try:
            assert other.stdout is not None
            url = f"http://127.0.0.1:{other.stdout.readline().split('port ')[1].split()[0]}"
            with pytest.raises(BadEnvironment, match="is no OpenEnv server: did not receive a valid HTTP"):
                check_environment(OrchestratorConfig(environment=at(url)))
        finally:
            other.kill()


def at(url: str) -> EnvironmentConfig:
    """An environment on whatever is at an address."""
    return EnvironmentConfig(name="openenv", args={"url": url, "action": ACTION})


def test_the_package_that_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    args = {"url": "http://127.0.0.1:1", "action": ACTION}
    with pytest.raises(BadEnvironment, match="uv sync --inexact --group openenv"):
        make_environment(EnvironmentConfig(name="openenv", args=args))
