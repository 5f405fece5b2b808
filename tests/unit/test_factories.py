"""Objects with tools, one for each rollout, as TRL's `environment_factory` makes them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from templates import write_chat
from test_programs import RUN, VERSION, Interrupted, Power, complete, digest
from test_tools import Script, call

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.environments import BadEnvironment, Model, check_environment, make_environment
from cairn.orchestrator.environments.trl_env_factory import FactoryPrograms

MODULE = """
made = []


class Walker:
    def __init__(self):
        self.done, made[len(made):] = [], [self]

    def reset(self, start, **row):
        assert set(row) == {"prompt", "goal"}
        self.at, self.goal = start, row["goal"]
        return f" You are at {start}."

    def go(self, steps: int) -> str:
        \"\"\"Walk.

        Args:
            steps: How far.
        \"\"\"
        self.done.append(steps)
        self.at += steps
        return str(self.at)

    async def look(self) -> dict:
        \"\"\"Look for the goal.\"\"\"
        return {"left": self.goal - self.at}

    def get_reward(self):
        return float(self.at == self.goal)

    def _hidden(self):
        raise AssertionError


class Fickle(Walker):
    def reset(self, start, **row):
        return super().reset(start, **row) + str(len(made))


class Silent:
    def reset(self, **row):
        return None


class Still(Walker):
    reset = None


class Unrewarded(Silent):
    def look(self) -> str:
        \"\"\"Look.\"\"\"
        return "nothing"


def steps(completions, environments, goal, **kwargs):
    (messages,), (walker,), (goal,) = completions, environments, goal
    assert [one["role"] for one in messages[:2]] == ["assistant", "tool"]
    return [walker.at / goal]
"""
ROWS = [{"prompt": "Go.", "start": 1, "goal": 8}] * 3
SCRIPT = (call("go", steps=3) + call("look"), call("go", steps="4") + call("fly"), "it is 4")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return write_chat(tmp_path_factory.mktemp("chat"), "thinking")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "my_walker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def configuration(folder: Path, **args: Any) -> OrchestratorConfig:
    args = {"data": str(folder / "rows.jsonl"), "environment_factory": "my_walker:Walker", **args}
    return OrchestratorConfig(
        environment=EnvironmentConfig(name="dataset", args=args),
        sampling=SamplingConfig(max_tokens=200, chunk_tokens=32),
        tool_parser="hermes",
        samples_per_prompt=2,
        reward_retries=0,
    )


class OneByOne(FactoryPrograms):
    """Who is killed while it records one rollout's call does not kill another's on its way."""

    async def rollout(self, problem: int, model: Model) -> Any:
        async with self.__dict__.setdefault("alone", asyncio.Lock()):
            return await super().rollout(problem, model)


def runner(config: OrchestratorConfig, ledger: Path, servers: Script) -> ProgramRunner:
    servers.version = VERSION
    ledger.mkdir(exist_ok=True)
    environment = OneByOne(make_environment(config.environment), config)
    opened = Interrupted(ledger / "ledger.sqlite", RUN, None, 0)
    return ProgramRunner(config, environment, servers.chat, servers, opened, {VERSION})


def test_an_object_for_each_rollout_that_dies_at_every_call(folder: Path, chat: ChatFormat):
    """What it said is recorded; a new one is led to the same place before anything new is asked of it."""
    import my_walker  # pyright: ignore[reportMissingImports]

    config = configuration(folder, rewards=[{"function": "my_walker:steps", "weight": 0.5}])
    calm_servers = Script(chat, *SCRIPT)
    calm = complete(runner(config, folder / "calm", calm_servers))
    parts = {"steps": 1.0, "Walker": 1.0, "tool_calls": 4.0, "tool_errors": 1.0, "malformed_calls": 0.0}
    assert [rollout.parts for rollout in calm.rollouts] == [parts] * 2
    assert calm.rewards == [1.5, 1.5]
    seen = calm_servers.seen[-1]
    assert "Go. You are at 1." in seen
    assert '{"left": 4}' in seen
    assert "there is no tool 'fly', only: go, look" in seen
    assert "_hidden" not in seen
    servers, deaths = Script(chat, *SCRIPT), 0
    while True:
        one = runner(config, folder / "stormy", servers)
        one.ledger.left = 0
        try:
            stormy = complete(one)
            break
        except Power:
            deaths += 1
    assert [rollout.failed for rollout in stormy.rollouts] == [None, None]
    assert deaths >= 2 * (1 + 3 + 4 + 1)
    assert stormy == calm
    assert digest(stormy) == digest(calm)
    assert sorted(servers.asked) == sorted(calm_servers.asked)
    walked = [one.done for one in my_walker.made]
    assert all(done == [3, 4][: len(done)] for done in walked)


def test_an_object_that_is_another_one_after_a_restart_has_failed(folder: Path, chat: ChatFormat):
    config, servers = configuration(folder, environment_factory="my_walker:Fickle"), Script(chat, *SCRIPT)
    one = runner(config, folder / "run", servers)
    one.ledger.left = 0
    with pytest.raises(Power):
        complete(one)
    group = complete(runner(config, folder / "run", servers))
    assert "reset, called again after a restart, leads to something else" in (group.failure or "")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"environment_factory": "my_walker:Nobody"}, "Nobody"),
        ({"environment_factory": "my_walker:steps"}, "is called without arguments, and raises TypeError"),
        ({"environment_factory": "my_walker:Still"}, "makes a Still, which has no method reset"),
        ({"environment_factory": "my_walker:Silent"}, "a Silent has no methods to be tools"),
        ({"environment_factory": "my_walker:Unrewarded"}, "rewards is empty"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"rewards": ["my_walker:steps"], "environment_factory": None}, "needs environments"),
    ],
)
def test_wrong_settings(folder: Path, args: dict[str, Any], why: str):
    with pytest.raises(BadEnvironment, match=why):
        check_environment(configuration(folder, **args))


def test_a_resume_notices_another_class(folder: Path):
    def identity(**args: Any) -> str:
        found: Any = check_environment(configuration(folder, **args))
        return found.identity

    assert identity() == identity() != identity(environment_factory="my_walker:Fickle")
    assert identity(max_turns=3) != identity()
