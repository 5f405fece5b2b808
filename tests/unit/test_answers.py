"""Answers read by vLLM's own parsers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from templates import write_chat
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.completion.answers import (
    Answer,
    PlainText,
    ToolCall,
    UnknownParser,
    VllmParser,
    check_parsers,
    parser_names,
)
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.conversation import Conversation
from cairn.run.errors import UsageError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
READ = ToolCall("weather", '{"city": "Paris", "days": 3}')


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return write_chat(tmp_path_factory.mktemp("chat"), "thinking")


@pytest.fixture(scope="module")
def parser(chat: ChatFormat) -> VllmParser:
    return VllmParser(chat, "hermes", "deepseek_r1")


def sampled(chat: ChatFormat, text: str) -> list[int]:
    """The tokens of an answer that the model ended."""
    return chat.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "tools", "answer"),
    [
        ("<think>the fox</think>sunny", TOOLS, Answer("sunny", "the fox")),
        ("<think>the fox</think>" + CALL, TOOLS, Answer("", "the fox", (READ,))),
        ("<think>a</think>first " + CALL + CALL, TOOLS, Answer("first ", "a", (READ, READ))),
        ("<think>the fox</think>" + CALL, None, Answer(CALL, "the fox")),
        ("<think>a</think><tool_call>\n{not json}\n</tool_call>", TOOLS, "content"),
        ('<think>a</think><tool_call>{"name": "weather", "arguments": [1]}</tool_call>', TOOLS, "content"),
        ('<think>a</think><tool_call>{"name": "", "arguments": {}}</tool_call>', TOOLS, "content"),
        ('<think>a</think><tool_call>{"name": 3}</tool_call>', TOOLS, "content"),
        ("<think>a</think></tool_call><tool_call>", TOOLS, "content"),
    ],
)
def test_reasoning_and_calls_are_read_and_malformed_calls_are_content(
    text: str, tools: list | None, answer: Answer | str, chat: ChatFormat, parser: VllmParser
):
    read = parser(sampled(chat, text), tools)
    if isinstance(answer, Answer):
        assert [json.loads(call.arguments) for call in read.tool_calls] == [
            json.loads(call.arguments) for call in answer.tool_calls
        ]
        assert read == answer
    else:
        assert read == Answer(text.removeprefix("<think>a</think>"), "a", malformed=True)


def test_a_cut_call_is_content(chat: ChatFormat):
    parser = VllmParser(chat, "qwen3_coder", "qwen3")
    call = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    read = parser(sampled(chat, "<think>the fox</think>\n\n" + call), TOOLS)
    assert (read.reasoning, [c.name for c in read.tool_calls]) == ("the fox", ["weather"])
    assert json.loads(read.tool_calls[0].arguments) == {"days": 3}
    cut = parser(sampled(chat, "<think>a</think>so <tool_call>\n<function=weath")[:-1], TOOLS)
    assert not cut.tool_calls
    assert not cut.malformed, "that is counted as cut off"
    assert "<function=weath" in cut.content


def test_without_parsers_an_answer_is_its_text(chat: ChatFormat):
    text = "<think>the fox</think>" + CALL
    for parser in (PlainText(chat), VllmParser(chat)):
        assert parser(sampled(chat, text), TOOLS) == Answer(text)


def test_a_tool_conversation_goes_on_in_its_branch(chat: ChatFormat, parser: VllmParser):
    conversation = Conversation(chat, {}.__getitem__, parser)
    messages: list = [{"role": "user", "content": "what is the weather?"}]
    for _ in range(3):
        context = conversation.next(messages, TOOLS)
        message = conversation.sampled(context, sampled(chat, "<think>the fox</think>" + CALL))
        assert message["reasoning_content"] == "the fox"
        [call] = message["tool_calls"]
        assert len(call["id"]) == 9
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        messages = [*messages, message, result]
        assert (context.branch, bool(context.kept)) == (0, len(messages) > 3)
    ids = [m["tool_calls"][0]["id"] for m in messages if "tool_calls" in m]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_without_vllm(setting: str):
    """The names are those that vLLM registers."""
    managers = {"tool_parser": ToolParserManager, "reasoning_parser": ReasoningParserManager}
    assert parser_names(setting) == set(managers[setting].list_registered())
    with pytest.raises(UsageError, match=rf"orchestrator.{setting} = 'hermez': .* it has .*mistral"):
        check_parsers(OrchestratorConfig(**{setting: "hermez"}))
    check_parsers(OrchestratorConfig(**{setting: "mistral"}))


def test_a_launcher_checks_parsers_without_importing_vllm():
    code = (
        "import sys; from cairn.config.orchestrator import OrchestratorConfig as C; "
        "from cairn.orchestrator.completion.answers import check_parsers; "
        "check_parsers(C(tool_parser='hermes')); "
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_parsers_are_named(chat: ChatFormat, tmp_path: Path):
    with pytest.raises(UnknownParser, match=r"no tool parser 'nonsense'; it has .*hermes"):
        VllmParser(chat, "nonsense")
    with pytest.raises(UnknownParser, match="no reasoning parser 'nonsense'"):
        VllmParser(chat, None, "nonsense")
