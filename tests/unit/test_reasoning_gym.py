"""Tasks of reasoning-gym as environments."""

import asyncio
import json
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from runs import REPOSITORY

from cairn.config.cli import load
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig
from cairn.orchestrator.environments import BadEnvironment, SingleTurn, make_environment


def made(**args: object):
    return make_environment(EnvironmentConfig(name="reasoning_gym", args=args))


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(BadEnvironment, match="uv sync --inexact --group reasoning-gym"):
        made(task="gcd")


EXAMPLE = REPOSITORY / "recipes" / "spell_backward"
RL = tomllib.loads((EXAMPLE / "rl.toml").read_text())


def test_the_example_is_complete(tmp_path: Path):
    """Its files are read by the commands, and its demonstrations are words backward that end early."""
    for kind, name in ((RLConfig, "rl"), (SFTConfig, "sft")):
        config = load(kind, ["@", str(EXAMPLE / f"{name}.toml"), "--output-dir", str(tmp_path)])
        assert config.max_steps is not None
    records = [json.loads(line) for line in (EXAMPLE / "sft.jsonl").read_text().splitlines()]
    whole = 0
    for record in records:
        question, answer = (message["content"] for message in record["messages"])
        word = question.rpartition(": ")[2]
        assert answer
        assert word[::-1].startswith(answer)
        whole += len(answer) == len(word)
    assert 0.1 < whole / len(records) < 0.7


class TestWithThePackage:
    """Needs the dependency group reasoning-gym."""

    @pytest.fixture(autouse=True)
    def package(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib
            pytest.importorskip("reasoning_gym", reason="needs the dependency group reasoning-gym")

    def test_problems_and_scores(self):
        words = {"min_word_len": 3, "max_word_len": 5}
        environment = made(task="spell_backward", size=20, seed=3, config=words, system="Answer only.")
        assert len(environment) == 20

        async def ask() -> None:
            with SingleTurn(environment, OrchestratorConfig()) as asked:
                system, question = await asked.messages(4)
                assert system == {"role": "system", "content": "Answer only."}
                word = question["content"].rpartition(": ")[2]
                assert await asked.reward(4, f" {word[::-1]}\n") == (1.0, {})
                assert await asked.reward(4, "") == (0.0, {})

        asyncio.run(ask())
        again = made(task="spell_backward", size=20, seed=3, config=words)
        assert [again.messages(i) for i in range(20)] == [environment.messages(i)[1:] for i in range(20)]

    def test_the_problems_of_the_example(self):
        """The server has room for them and their answers; whole words score best."""
        environment = make_environment(EnvironmentConfig(**RL["orchestrator"]["environment"]))
        assert len(environment) == 4096
        for problem in range(0, 4096, 64):
            (message,) = environment.messages(problem)
            question = message["content"]
            word = question.rpartition(": ")[2]
            assert 3 <= len(word) < RL["orchestrator"]["sampling"]["max_tokens"]
            assert len(question) + 10 < RL["inference"]["max_model_len"]
            assert environment.reward(problem, word[::-1]) == 1.0
            assert 0.0 < environment.reward(problem, word[:0:-1]) < 1.0

    def test_a_tag_marks_the_answer(self):
        environment = made(task="products", size=5, tag="answer")
        left, right = environment.messages(0)[0]["content"].split(": ")[1].split(". ")[0].split(" * ")
        product = int(left) * int(right)
        assert environment.reward(0, f"<answer>1</answer> no: <answer>{product}</answer>") == 1.0
        assert environment.reward(0, str(product)) == 0.0

    def test_several_tasks(self):
        tasks = [
            {"name": "gcd", "weight": 3},
            {"name": "products", "config": {"max_digits": 1, "min_digits": 1}},
        ]
        environment = made(task=tasks, size=200)
        gcds = sum("GCD" in environment.messages(i)[0]["content"] for i in range(200))
        assert 110 < gcds < 190

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ({"task": "spell_backwards"}, "has none of that name; it has .*, spell_backward, "),
            ({"task": "gcd", "size": 0}, "at least one problem"),
            ({"task": "gcd", "config": {"min_word": 3}}, "min_word"),
            ({"task": [{"task": "gcd"}]}, "a task is a table with name, weight and config"),
            ({"task": [{"name": "gcd"}], "config": {"a": 1}}, "each table has its own config"),
        ],
    )
    def test_wrong_arguments(self, args: dict, message: str):
        with pytest.raises(BadEnvironment, match=message):
            made(**args)
