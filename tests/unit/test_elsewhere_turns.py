"""Tools and worlds in processes of their own, which are killed at every call and step."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_programs
import test_tools
import test_worlds
from errands import Servers
from runs import REPOSITORY
from templates import write_chat
from test_programs import complete, digest

from cairn.config.orchestrator import EnvironmentConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.environments import EnvironmentFailed, make_environment
from cairn.orchestrator.environments.tools import Tool


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes can import the tests' modules."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return write_chat(tmp_path_factory.mktemp("chat"), "thinking")


def elsewhere(environment: str, **args: Any) -> Any:
    """An environment in a process of its own, with this interpreter."""
    about = {"environment": f"lonely:{environment}", "args": args}
    return make_environment(EnvironmentConfig(name="process", args=about))


def done(folder: Path) -> Counter[str]:
    return Counter((folder / "done").read_text().splitlines())


SCRIPT = (
    test_tools.call("add", a="3") + test_tools.call("add", a=1, b=None) + test_tools.call("add", b=1),
    test_tools.call("half", of=8, how="up") + test_tools.call("half", of=3),
    "it is 4",
)


def test_tools_whose_process_is_killed_at_every_call(tmp_path: Path, chat: ChatFormat):
    """Each call is made once and each token sampled once; the model is told what it is told undisturbed."""
    groups, servers, folders = [], [], []
    for mortal in (False, True):
        (folder := tmp_path / str(mortal)).mkdir()
        folders.append(folder)
        servers.append(test_tools.Script(chat, *SCRIPT))
        environment = elsewhere("Tooled", folder=str(folder), mortal=mortal)
        settings = {"reward_retries": 40, "reward_retry_seconds": 0.0}
        groups.append(complete(test_tools.runner(folder / "run", environment, servers[-1], **settings)))
    calm, stormy = groups
    counts = {"tool_calls": 5.0, "tool_errors": 3.0, "malformed_calls": 0.0}
    assert calm.rollouts[0].parts == {"right": 1.0, "turns": 9.0, **counts}
    assert stormy == calm
    assert digest(stormy) == digest(calm)
    noted = Counter(2 * ["add 3 5", "add 1 None", "half 8.0 up ()", "reward it is 4"])
    assert done(folders[0]) == done(folders[1]) == noted
    assert len(list(folders[1].glob("died-*"))) == 4
    assert sorted(servers[1].asked) == sorted(servers[0].asked)
    for told in ("Error: TypeError: ", "Error: wrong arguments: ", "Error: ValueError: 3.0 is odd"):
        assert told in servers[0].seen[-1]
    assert '{"half": 4.0}' in servers[0].seen[-1]


def test_a_tool_elsewhere_is_described_as_it_is_here(tmp_path: Path):
    import lonely

    here, there = lonely.Tooled(tmp_path), elsewhere("Tooled", folder=str(tmp_path))
    schemas = [Tool(one).schema for one in here.tools]
    for schema in schemas:
        schema["function"].pop("return", None)
    assert [Tool(one).schema for one in there.tools] == schemas


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Walk", "KeptWalk"])
def test_a_world_whose_process_is_killed_at_every_step(tmp_path: Path, kind: str):
    """It is made again in the next process, by its steps or from its snapshot."""
    groups, servers, folders = [], [], []
    for mortal in (False, True):
        (folder := tmp_path / str(mortal)).mkdir()
        folders.append(folder)
        servers.append(Servers())
        environment = elsewhere(kind, folder=str(folder), mortal=mortal)
        settings: dict[str, Any] = {"reward_retries": 40}
        groups.append(complete(test_worlds.runner(folder / "run", environment, servers[-1], **settings)))
    calm, stormy = groups
    assert stormy == calm
    assert digest(stormy) == digest(calm)
    assert len(calm.rollouts[0].turns) == 4
    assert Counter(seed for seed, _ in servers[1].asked) == Counter(seed for seed, _ in servers[0].asked)
    assert len(list(folders[1].glob("died-*"))) == 2 * 4
    times = sorted((int(what.split()[1]), count) for what, count in done(folders[1]).items())
    assert [count for _, count in times] == ([4, 4, 3, 3, 2, 2, 1, 1] if kind == "Walk" else [1] * 8)
    assert [len((folder / "closed").read_text().split()) for folder in folders] == [2, 2]


def test_a_world_that_raises_has_failed(tmp_path: Path):
    environment = elsewhere("Walk", folder=str(tmp_path), mortal=False)

    async def walk() -> None:
        world, seen = await environment.start(2, 7)
        assert seen == "2"
        assert await environment.step(world, "a") == ("a1", {"early": 0.125}, False)
        with pytest.raises(EnvironmentFailed, match="ZeroDivisionError: no way"):
            await environment.step(world, "raise")

    asyncio.run(walk())


def test_a_programs_snapshots_survive_its_process(tmp_path: Path):
    environment, servers = elsewhere("Kept", folder=str(tmp_path)), Servers()
    settings = {"reward_retries": 40}
    group = complete(test_programs.runner(tmp_path / "run", environment, servers, **settings))
    assert [rollout.parts for rollout in group.rollouts] == [{"places": 3.0, "named": 1.0}] * 2
    assert len(list(tmp_path.glob("died-*"))) == 2 * 3
    assert set(Counter((tmp_path / "visits").read_text().splitlines()).values()) == {1}
    assert set(Counter(seed for seed, _ in servers.asked).values()) == {1}
