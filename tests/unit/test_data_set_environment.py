"""The environment `dataset`: problems from records, rewards from functions as TRL's users write them."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments import (
    BadEnvironment,
    EnvironmentFailed,
    SingleTurn,
    make_environment,
)

ROWS = [
    {"question": "2+3", "answer": "5", "level": 1},
    {"question": "4+4", "answer": "8", "level": 2},
]
MY_REWARDS = """
import numpy as np

def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

async def slow(prompts, completions, answer, *, scale=1.0):
    assert len(prompts) == len(completions) == len(answer) == 1
    return [scale * (answer[0] in completions[0])]

def only_hard(completions, level, **kwargs):
    return [1.0 if one > 1 else None for one in level]

def of_array(completions):
    return np.array([0.5])

def conversational(prompts, completions, **kwargs):
    (prompt,), (completion,) = prompts, completions
    return [float(prompt[-1]["content"] == "2+3" and completion == [{"role": "assistant", "content": "5"}])]

def seen(prompts, **kwargs):
    return [float(prompts[0] == "What is 2+3? {x}")]

def bare(completions):
    return 0.25

def two(completions):
    return [1.0, 2.0]

def text(completions):
    return ["good"]

def with_ids(completions, completion_ids):
    return [0.0]

def failing(completions):
    raise RuntimeError("out of service")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a data set and a module of reward functions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my_rewards_of_test.py").write_text(MY_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards_of_test", raising=False)
    return tmp_path


def made(folder: Path, rewards: Any, **args: Any) -> Any:
    """The environment; `rewards` of the test's module are given by name."""

    def path(name: str) -> str:
        return name if name == "exact_match" else f"my_rewards_of_test:{name}"

    given = [
        path(one) if isinstance(one, str) else one | {"function": path(one["function"])} for one in rewards
    ]
    args = {"data": str(folder / "sums.jsonl"), "prompt": "question", "rewards": given} | args
    return make_environment(EnvironmentConfig(name="dataset", args=args))


def rewarded(environment: Any, problem: int, answer: str) -> float:
    """As the orchestrator asks."""

    async def ask() -> float:
        with SingleTurn(environment, OrchestratorConfig()) as asked:
            return (await asked.reward(problem, answer))[0]

    return asyncio.run(ask())


def content(environment: Any, problem: int) -> list[tuple[str, str]]:
    """The conversation, checked as the orchestrator does."""

    async def ask() -> Any:
        with SingleTurn(environment, OrchestratorConfig()) as asked:
            return await asked.messages(problem)

    return [(message["role"], message["content"]) for message in asyncio.run(ask())]


def test_records_are_problems(folder: Path):
    plain = made(folder, ["exact_match"])
    assert len(plain) == 2
    assert content(plain, 1) == [("user", "4+4")]
    dressed = made(
        folder,
        ["exact_match"],
        template="What is {question}? {{x}}",
        system="Be brief.",
        examples=[{"prompt": "1+1", "completion": "2"}],
        split="train[1:]",
    )
    assert len(dressed) == 1
    assert content(dressed, 0) == [
        ("system", "Be brief."),
        ("user", "1+1"),
        ("assistant", "2"),
        ("user", "What is 4+4? {x}"),
    ]


def test_a_conversation_keeps_its_own_system_prompt(folder: Path):
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "2+3"}]
    (folder / "talks.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    args = {"data": str(folder / "talks.jsonl"), "prompt": "prompt", "system": "Other."}
    environment = made(folder, ["conversational"], **args)
    assert content(environment, 0) == [("system", "Own."), ("user", "2+3")]
    assert rewarded(environment, 0, "5") == 1.0
    assert rewarded(environment, 0, "6") == 0.0


@pytest.mark.parametrize(
    ("rewards", "problem", "answer", "wanted"),
    [
        (["exact_match"], 0, " 5\n", 1.0),
        (["exact_match"], 0, "15", 0.0),
        (["length", {"function": "exact_match", "weight": 10}], 0, "5", 11.0),
        ([{"function": "slow", "args": {"scale": 3.0}, "weight": 0.5}, "of_array"], 1, "it is 8", 2.0),
        (["only_hard", "length"], 0, "abc", 3.0),
        (["only_hard", "length"], 1, "abc", 4.0),
        (["bare"], 0, "", 0.25),
    ],
)
def test_rewards_are_a_weighted_sum(
    folder: Path, rewards: Sequence[Any], problem: int, answer: str, wanted: float
):
    assert np.isclose(rewarded(made(folder, rewards), problem, answer), wanted)


def test_parts_are_told_by_name(folder: Path):
    rewards = ["only_hard", {"function": "length", "weight": 0.5}]

    async def ask() -> tuple[float, dict[str, float]]:
        with SingleTurn(made(folder, rewards), OrchestratorConfig()) as asked:
            return await asked.reward(0, "abc")

    assert asyncio.run(ask()) == (1.5, {"length": 3.0})


def test_functions_see_the_rendered_template(folder: Path):
    environment = made(folder, ["seen"], template="What is {question}? {{x}}")
    assert [rewarded(environment, problem, "") for problem in (0, 1)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("two", "two returned 2 rewards for one answer"),
        ("text", "text must return a list with one finite number"),
        ("failing", "RuntimeError: out of service"),
        ("only_hard", "unscored: environment 'reverse_text': reward of problem 0 returned None"),
    ],
)
def test_a_reward_that_is_none_is_no_zero(folder: Path, reward: str, message: str):
    with pytest.raises(EnvironmentFailed, match=message):
        rewarded(made(folder, [reward]), 0, "abc")


@pytest.mark.parametrize(
    ("rewards", "args", "message"),
    [
        (
            ["with_ids"],
            {},
            "needs completion_ids; functions are given, by name, prompts, completions, ",
        ),
        ([], {}, "rewards is empty"),
        (["length", "length"], {}, "two reward functions are called 'length'"),
        (["missing"], {}, "has no attribute 'missing'"),
        ([{"function": "length", "weigth": 2}], {}, "function, weight, args and group"),
        ([{"function": "length", "weight": "2"}], {}, "the weight of reward"),
        (["length"], {"prompt": "prompt"}, "has no column 'prompt'; its columns are question, answer, level"),
        (["length"], {"template": "{problem}"}, "the template '{problem}' fails: KeyError"),
        (["length"], {"prompt": "level"}, "sums.jsonl, line 1: its prompt is the number 1"),
        (["length"], {"examples": [{"q": "1"}]}, "an example has a prompt and a completion"),
        (["length"], {"data": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
        (["length"], {"split": "test"}, "a file has one split, train"),
        (["length"], {"colum": "prompt"}, "unexpected keyword argument 'colum'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(
    folder: Path, rewards: Sequence[Any], args: dict[str, Any], message: str
):
    with pytest.raises(BadEnvironment, match=r"orchestrator\.environment\.args") as raised:
        made(folder, rewards, **args)
    assert message in str(raised.value)


def test_every_record_is_checked(folder: Path):
    with (folder / "sums.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"question": " ", "answer": "", "level": 1}) + "\n")
    with pytest.raises(BadEnvironment, match=r"sums\.jsonl, line 4: its prompt is empty"):
        made(folder, ["exact_match"])


def test_the_identity_follows_records_and_functions(folder: Path):
    first = made(folder, ["exact_match"]).identity
    assert made(folder, ["exact_match"]).identity == first
    assert made(folder, [{"function": "exact_match", "weight": 2}]).identity != first
    mine = made(folder, ["bare"]).identity
    (folder / "my_rewards_of_test.py").write_text(MY_REWARDS.replace("0.25", "0.26"))
    assert made(folder, ["bare"]).identity != mine
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
    assert made(folder, ["exact_match"]).identity != first
