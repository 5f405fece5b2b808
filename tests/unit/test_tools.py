"""Environments whose tools are Python functions, asked by a model that plays a script."""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from errands import Servers
from runs import REPOSITORY
from templates import write_chat
from test_programs import RUN, VERSION, Interrupted, Power, complete, digest

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.advantages import to_samples
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.environments import (
    BadEnvironment,
    EnvironmentFailed,
    Model,
    ToolPrograms,
    check_environment,
)
from cairn.orchestrator.metrics import batch_metrics
from cairn.policy.generation import Generation, SamplingParams, VersionSpan


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return write_chat(tmp_path_factory.mktemp("chat"), "thinking")


def call(name: str, **arguments: Any) -> str:
    """A call as hermes writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script(Servers):
    """Answers turn n of a conversation with text n of the script, whatever piece of it is asked for."""

    def __init__(self, chat: ChatFormat, *answers: str):
        super().__init__()
        self.chat, self.answers = chat, answers
        self.seen: list[str] = []

    def tokens(self, text: str) -> list[int]:
        return self.chat.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions: Collection[str],
        began: str | None = None,
        sessions: Sequence[int] = (),
    ) -> list[Generation]:
        self.asked.append((params.seed or 0, list(prompt_ids)))
        text = self.chat.full_text(list(prompt_ids))
        self.seen.append(text)
        turn = text.count("<|im_start|>assistant\n") - 1
        (start,) = self.tokens("<|im_start|>")
        last = len(prompt_ids) - prompt_ids[::-1].index(start)
        done = len(prompt_ids) - last - len(self.tokens("assistant\n"))
        rest = self.tokens(self.answers[turn] + "<|im_end|>")[done:]
        piece = rest[: params.max_tokens]
        end = "stop" if len(piece) == len(rest) else "length"
        spans = [VersionSpan(self.version, 0, len(piece))]
        return [Generation(piece, [-(1 + t) / 1024 for t in piece], spans, end)]


class Numbers:
    """Adds and halves; each call is noted."""

    identity = "numbers-1"
    max_turns = 5

    def __init__(self) -> None:
        self.tools: list[Any] = [self.add, self.half]
        self.made: list[str] = []
        self.alive = lambda: True
        self.rewarded: list[tuple[str, list[dict]]] = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: Another.
        """
        return self.note(f"add {a} {b}", a + b)

    async def half(self, of: int) -> dict[str, float]:
        """Divide by two.

        Args:
            of: A number.
        """
        if of % 2:
            raise ValueError(f"{of} is odd")
        return self.note(f"half {of}", {"half": of / 2})

    def note(self, what: str, result: Any) -> Any:
        if not self.alive():
            raise EnvironmentFailed("a process that is dead calls no tools")
        self.made.append(what)
        return result

    def __len__(self) -> int:
        return 3

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"problem {problem}"}]

    def reward(self, problem: int, answer: str, messages: list[dict]) -> Any:
        self.rewarded.append((answer, messages))
        return float(answer == "it is 4")


class OneByOne(ToolPrograms):
    """Who is killed while it records one rollout's call does not kill another's on its way."""

    async def rollout(self, problem: int, model: Model) -> Any:
        async with self.__dict__.setdefault("alone", asyncio.Lock()):
            return await super().rollout(problem, model)


SCRIPT = (call("add", a=3, b=5) + call("add", a=1, b=1), call("half", of=8), "it is 4")


def runner(folder: Path, environment: Any, servers: Script, **settings: Any) -> ProgramRunner:
    """One that samples in pieces of 32 tokens."""
    servers.version = VERSION
    config = OrchestratorConfig(
        sampling=SamplingConfig(max_tokens=200, chunk_tokens=32),
        **{"samples_per_prompt": 2, "reward_retries": 0, "tool_parser": "hermes", **settings},
    )
    folder.mkdir(exist_ok=True)
    ledger = Interrupted(folder / "ledger.sqlite", RUN, None, 0)
    return ProgramRunner(config, OneByOne(environment, config), servers.chat, servers, ledger, {VERSION})


def tool_messages(environment: Numbers) -> list[str]:
    """What the tools said in the last rollout."""
    return [message["content"] for message in environment.rewarded[-1][1] if message["role"] == "tool"]


def test_the_model_calls_tools_until_it_answers(chat: ChatFormat, tmp_path: Path):
    environment, servers = Numbers(), Script(chat, *SCRIPT)
    group = complete(runner(tmp_path, environment, servers))
    assert group.rewards == [1.0, 1.0]
    assert environment.made == ["add 3 5", "add 1 1", "half 8"] * 2
    answer, messages = environment.rewarded[0]
    roles = [message["role"] for message in messages]
    assert (answer, roles) == (
        "it is 4",
        ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"],
    )
    assert tool_messages(environment) == ["8", "2", '{"half": 4.0}']
    assert "Add two numbers." in servers.seen[0]
    assert '<|im_start|>tool\n{"half": 4.0}<|im_end|>\n' in servers.seen[-1]
    assert len(to_samples(group, lambda group: group.rewards)) == 2  # one branch each
    metrics = batch_metrics([group], 1)
    assert [metrics[f"rollout/{name}"] for name in ("turns", "tool_calls", "tool_errors")] == [3, 3, 0]
    assert metrics["reward/answer/mean"] == 1.0
    assert "reward/tool_calls/mean" not in metrics


def test_a_tool_task_is_interrupted_at_every_call(chat: ChatFormat, tmp_path: Path):
    """Each token is sampled once, each tool called once, and what is learned is the same."""
    calm_servers = Script(chat, *SCRIPT)
    calm = complete(runner(tmp_path / "calm", Numbers(), calm_servers))
    environment, servers = Numbers(), Script(chat, *SCRIPT)
    deaths = 0
    while True:
        one = runner(tmp_path / "run", environment, servers)
        one.ledger.left = 0
        environment.alive = lambda ledger=one.ledger: ledger.left >= 0
        try:
            group = complete(one)
            break
        except Power:
            deaths += 1
    assert deaths > 12
    assert digest(group) == digest(calm)
    assert group == calm
    assert Counter(seed for seed, _ in servers.asked) == Counter(seed for seed, _ in calm_servers.asked)
    assert environment.made == ["add 3 5", "add 1 1", "half 8"] * 2
    assert [rollout.diverged for rollout in group.rollouts] == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (call("half", of=3), "Error: ValueError: 3 is odd"),
        (call("third", of=3), "Error: there is no tool 'third', only: add, half"),
        (call("add", a=1), "Error: wrong arguments: b: Missing required argument"),
        (call("add", a=1, b=2, c=3), "Error: wrong arguments: c: Unexpected keyword argument"),
        (call("half", of="x"), "Error: wrong arguments: of: Input should be a valid integer"),
    ],
)
def test_the_model_is_told_what_is_wrong_with_its_call(
    wrong: str, said: str, chat: ChatFormat, tmp_path: Path
):
    environment = Numbers()
    group = complete(runner(tmp_path, environment, Script(chat, wrong, "it is 4")))
    (message,) = tool_messages(environment)
    assert message.startswith(said)
    assert group.rewards == [1.0, 1.0]
    assert batch_metrics([group], 1)["rollout/tool_errors"] == 1
    assert not environment.made


def test_calls_end_at_the_last_turn(chat: ChatFormat, tmp_path: Path):
    """The last ones are not made."""
    environment = Numbers()
    group = complete(runner(tmp_path, environment, Script(chat, *[call("add", a=1, b=1)] * 9)))
    assert [len(rollout.turns) for rollout in group.rollouts] == [5, 5]
    assert len(environment.made) == 2 * 4
    assert group.rewards == [0.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (math.nan, "reward must return a finite reward, but it is not one finite number: nan"),
        (None, "unscored: environment"),
        ({"tool_calls": 1.0}, "reward must call no part 'tool_calls'"),
    ],
)
def test_a_bad_reward_is_a_failure(reward: Any, message: str, chat: ChatFormat, tmp_path: Path):
    class Bad(Numbers):
        async def reward(self, problem: int, answer: str) -> Any:
            return reward

    group = complete(runner(tmp_path, Bad(), Script(chat, "it is 4")))
    assert message in (group.failure or "")


def test_a_tool_whose_world_has_died_fails_the_rollout_and_is_called_again(chat: ChatFormat, tmp_path: Path):
    environment, servers = Numbers(), Script(chat, *SCRIPT)
    environment.alive = lambda: len(environment.made) != 2
    group = complete(runner(tmp_path, environment, servers))
    assert "a process that is dead calls no tools" in (group.failure or "")
    asked = len(servers.asked)
    environment.alive = lambda: True
    environment.made.clear()
    mended = complete(runner(tmp_path, environment, servers))
    assert mended.rewards == [1.0, 1.0]
    assert len(servers.asked) > asked
    assert environment.made.count("add 3 5") == 1  # the first rollout had it in the ledger


class Untyped(Numbers):
    """Its tool has no type hints."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = [lambda x: x]


class Twice(Numbers):
    """It has two tools of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = [self.add, self.add]


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        ("Numbers", {}, "gives the model tools, but nothing reads its calls: set orchestrator.tool_parser"),
        (
            "Untyped",
            {"tool_parser": "hermes"},
            "tool <lambda> can't be described: <lambda> has no docstring",
        ),
        ("Twice", {"tool_parser": "hermes"}, "two of its tools have the same name: add, add"),
    ],
)
def test_what_has_no_usable_tools_is_refused_before_anything_starts(cls: str, settings: dict, message: str):
    config = OrchestratorConfig(environment=EnvironmentConfig(name=f"{__name__}:{cls}"), **settings)
    with pytest.raises((BadEnvironment, EnvironmentFailed)) as raised:
        check_environment(config)
    assert re.search(message, str(raised.value))


def test_the_example_in_the_docs_is_an_environment(
    chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    section = (REPOSITORY / "docs" / "how-to" / "tools.md").read_text()
    (tmp_path / "my_tools.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    named = EnvironmentConfig(name="my_tools:Calculator", args={"problems": 3})
    environment = check_environment(OrchestratorConfig(environment=named, tool_parser="hermes"))
    servers = Script(chat, call("add", a=0, b=0), "0, 2 or 4")
    group = complete(runner(tmp_path / "run", environment, servers))
    assert group.rewards == [1.1, 1.1]
