"""`cairn env try`: what it shows of environments of each kind, and of those that fail."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import REPOSITORY

from cairn.launch.main import env

MODEL = REPOSITORY / "configs" / "reverse_text" / "model"
OWN = '''
from cairn.orchestrator.environments import Rewards


class Base:
    def __len__(self):
        return 2

    def messages(self, problem):
        return [{"role": "user", "content": f"question {problem}"}]


class Fails(Base):
    def reward(self, problem, answer):
        return self.judge(answer)

    def judge(self, answer):
        raise KeyError("no such " + answer)


class Silent(Base):
    def reward(self, problem, answer):
        return None


class Group(Base):
    def rewards(self, problem, answers):
        return [float(len(answer) == min(map(len, answers))) for answer in answers]


class Tools(Base):
    def __init__(self):
        self.tools = [self.add]

    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    def reward(self, problem, answer):
        return float(answer == "5")


class World(Base):
    messages = None

    def start(self, problem, seed):
        return [seed], f"room {problem}"

    def step(self, world, answer):
        world.append(answer)
        if answer == "jump":
            raise OSError("a fall")
        return "next room", 0.5, answer == "out"


class Program(Base):
    async def rollout(self, problem, model):
        reply = await model.generate([{"role": "user", "content": "guess"}], max_tokens=4)
        found = await model.once("look", lambda: {"right": reply.text == "a"})
        return Rewards({"right": float(found["right"]), "length": 1.0}, weights={"length": 0.0})
'''
Tried = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tried:
    """`tried("own:World", ...)`: exit code, output and errors of the command, for environments in `OWN`."""
    (tmp_path / "own_to_try.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_to_try", raising=False)

    def tried(*arguments: object, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cairn env", "try", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        return (env(), *capsys.readouterr())

    return tried


def found(tried: Tried, *arguments: object, typed: str = "") -> dict[str, Any]:
    """What the command prints as JSON."""
    code, out, errors = tried(*arguments, "--json", typed=typed)
    assert code == 0, errors
    return json.loads(out)


def test_a_single_turn_is_shown_as_text_as_tokens_and_with_its_rewards(tried: Tried):
    code, out, _ = tried("reverse_text", "--tokenizer", MODEL, typed="chmy\nab\n")
    assert code == 0
    assert "problem 0 of 4096, of the environment reverse_text\n--- user\nymhc\n" in out
    assert "--- as the model reads it, 6 tokens\n<user>ymhc<assistant>\n4 '<user>'  95 'y'" in out
    assert "--- the answer as the record has it, 5 tokens, all of them learned\n73 'c'" in out
    assert "1 '<eos>'\nreward 1 for 'chmy'" in out
    as_json = found(tried, "reverse_text", "--args.problems", 9, "--problem", 8, "--answer", "x")
    assert (as_json["problem"], len(as_json["answers"])) == (8, 1)
    same = found(tried, "reverse_text", "--tokenizer", MODEL, "--answer", "chmy")
    assert same["prompt_ids"] == [4, 95, 83, 78, 73, 5]
    assert same["answers"][0] == {
        "answer": "chmy",
        "answer_ids": [73, 78, 83, 95, 1],
        "reward": 1.0,
        "parts": {},
    }


def test_rewards_of_a_group_are_given_together(tried: Tried):
    answers = found(tried, "own_to_try:Group", typed="abc\nab\n")["answers"]
    assert [one["reward"] for one in answers] == [0.0, 1.0]


def test_tools_are_called_by_what_is_typed(tried: Tried):
    call = json.dumps({"name": "add", "arguments": {"a": 2, "b": 3}})
    code, out, _ = tried("own_to_try:Tools", "--answer", call, "5")
    assert code == 0
    assert '--- tool add\n{"name": "add", "description": "Add."' in out
    assert "--- tool add\n5\n" in out
    assert "reward 1 (answer 1, tool_calls 1, tool_errors 0) for 2 answers" in out


def test_worlds_and_programs_go_on_until_they_end(tried: Tried):
    code, out, _ = tried("own_to_try:World", "--problem", 1, typed="left\nout\n")
    assert code == 0
    assert out.endswith("--- user\nroom 1\n--- user\nnext room\nreward 1 (step 1) for 2 answers\n")
    program = found(tried, "own_to_try:Program", "--answer", "a")
    assert (program["reward"], program["parts"]) == (1.0, {"right": 1.0, "length": 1.0})
    code, _, errors = tried("own_to_try:World", "--answer", "left")
    assert code == 2
    assert "after 1 answers the environment asks for another one; give it with --answer" in errors


def test_what_the_users_code_raises_is_shown_with_the_users_frames_only(tried: Tried):
    code, _, errors = tried("own_to_try:Fails", "--answer", "x")
    assert code == 1
    assert "error: environment 'own_to_try:Fails': reward of problem 0 raised KeyError" in errors
    assert errors.rstrip().endswith("KeyError: 'no such x'")
    places = [line for line in errors.splitlines() if line.lstrip().startswith("File ")]
    assert ["own_to_try.py" in place for place in places] == [True, True]
    code, _, errors = tried("own_to_try:World", "--answer", "jump")
    assert code == 1
    assert errors.count("own_to_try.py") == 1
    assert errors.rstrip().endswith("OSError: a fall")


def test_answers_that_nothing_is_said_of_and_problems_that_are_not_there(tried: Tried):
    assert found(tried, "own_to_try:Silent", "--answer", "x")["answers"] == [{"answer": "x", "reward": None}]
    code, _, errors = tried("own_to_try:Silent", "--problem", 2)
    assert code == 2
    assert "--problem 2: the environment has 2 problems, 0 to 1" in errors
    code, _, errors = tried("reverse_text", "--tokenizer", MODEL.parent)
    assert code == 2
    assert "it has no tokenizer_config.json" in errors
    code, _, errors = tried("reverse_txt")
    assert code == 2
    assert "nor module:Class; did you mean reverse_text?" in errors
