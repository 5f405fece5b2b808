"""The task with a calculator, and the files of its tiny model."""

import json
from pathlib import Path

import pytest

from cairn.orchestrator.completion.answers import VllmParser
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.conversation import Conversation
from cairn.orchestrator.environments.calculator import Calculator

FOLDER = Path("recipes/calculator")


def test_problems_follow_from_the_seed_and_rewards_from_the_characters():
    task = Calculator(problems=50, digits=3, seed=2)
    asked = [task.messages(i)[0]["content"] for i in range(50)]
    assert asked == [Calculator(problems=50, digits=3, seed=2).messages(i)[0]["content"] for i in range(50)]
    assert asked != [Calculator(problems=50, digits=3, seed=3).messages(i)[0]["content"] for i in range(50)]
    assert all(len(text) == 7 for text in asked)
    assert {text[3] for text in asked} == set("+-*")
    for number, text in enumerate(asked):
        wanted = str(eval(text))
        assert str(task.calculate(text)) == wanted
        assert task.reward(number, wanted) == 1
        assert task.reward(number, "") == task.reward(number, "x" * len(wanted)) == 0
        assert task.reward(number, wanted[:1]) == 1 / len(wanted)
        assert task.reward(number, wanted + wanted) == 0.5


@pytest.mark.parametrize("wrong", ["", "3+", "3**4", "1+2+3", "__import__('os')", "1" * 10 + "+1", "-1+2"])
def test_the_tool_refuses_what_is_no_expression(wrong: str):
    with pytest.raises(ValueError, match="two numbers"):
        Calculator().calculate(wrong)


@pytest.mark.parametrize("arguments", [{"problems": 0}, {"digits": 0}, {"digits": 10}])
def test_wrong_arguments_are_refused(arguments: dict[str, int]):
    with pytest.raises(ValueError, match="must be >= 1"):
        Calculator(**arguments)


def test_the_models_calls_are_read_and_its_template_never_rewrites():
    """So that a rollout is one branch, and what the demonstrations show is what vLLM's parser reads."""
    chat = ChatFormat(FOLDER / "model")
    records = [json.loads(line)["messages"] for line in (FOLDER / "sft.jsonl").read_text().splitlines()]
    shown = next(messages for messages in records if len(messages) == 4)
    text = chat.rendering(shown)
    assert chat.full_text(chat.prompt(shown)) == text
    conversation = Conversation(chat, {}.__getitem__, VllmParser(chat, "hermes"))
    said = text.split("<assistant>")[1].split("<tool>")[0]
    token_ids = chat.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert len(token_ids) < 20
    tools = [{"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}]
    context = conversation.next(shown[:1], tools)
    message = conversation.sampled(context, token_ids)
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "calculate"
    assert json.loads(call["function"]["arguments"]) == {"expression": shown[0]["content"]}
    result = {**shown[2], "tool_call_id": call["id"]}
    after = conversation.next([shown[0], message, result], tools)
    assert (after.branch, after.kept) == (0, len(context.token_ids) + len(token_ids))
    assert chat.full_text(after.appended) == f"<tool>{shown[2]['content']}<assistant>"
