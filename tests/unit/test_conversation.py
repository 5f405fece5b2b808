"""Conversations as the tokens that were seen and sampled, under chat templates of many styles."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from templates import STOPS, write_chat
from tiny import random_model
from transformers import LlamaConfig, PreTrainedModel

from cairn.orchestrator.completion import conversation
from cairn.orchestrator.completion.answers import Answer, ToolCall
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.conversation import Conversation, Histories, TokenContext

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "what is the weather?"}
NEXT = [{"role": "user", "content": "  and in Paris, 1234 ?\n"}]
RESULT = {"role": "tool", "content": "25 degrees", "tool_call_id": ""}
CALL = ToolCall("weather", '{"city": "Paris"}', id="123456789")


class Told:
    """Reads the next answer as the test says."""

    def __init__(self) -> None:
        self.answer = Answer("")

    def __call__(self, token_ids: Sequence[int], tools: object, stopped: object = None) -> Answer:
        return self.answer


class Recorded(dict[int, Any]):
    """The tokens of each branch, as the ledger has them."""

    def answered(self, context: TokenContext, token_ids: Sequence[int]) -> None:
        """Add a context and its answer."""
        before = self.get(context.branch, ())[: context.kept]
        self[context.branch] = np.asarray([*before, *context.appended, *token_ids], np.int32)


class Rollout:
    """A conversation with its messages and last context."""

    def __init__(self, chat: ChatFormat, tools: list[dict[str, Any]] | None = None):
        self.chat, self.tools, self.told = chat, tools, Told()
        self.recorded = Recorded()
        self.conversation = Conversation(chat, self.recorded.__getitem__, self.told)
        self.messages: list[dict[str, Any]] = [QUESTION]
        self.context = self.conversation.next(self.messages, tools)

    def answer(self, token_ids: Sequence[int], answer: Answer, new: Sequence[dict[str, Any]]) -> TokenContext:
        """Give the answer, add the new messages, and return the next context."""
        self.told.answer = answer
        self.recorded.answered(self.context, token_ids)
        message = self.conversation.sampled(self.context, token_ids)
        ids = [call["id"] for call in message.get("tool_calls", [])]
        new = [m | {"tool_call_id": ids[0]} if m["role"] == "tool" else m for m in new]
        self.messages = [*self.messages, message, *new]
        self.context = self.conversation.next(self.messages, self.tools)
        return self.context


def tokens(chat: ChatFormat, text: str) -> list[int]:
    """The tokens of a text."""
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def stop(chat: ChatFormat, style: str, *, call: bool = False) -> int:
    """The token that ends an answer in the template."""
    return chat.tokenizer.convert_tokens_to_ids(
        "<|call|>" if call and style == "gpt_oss" else STOPS[style][1][0]
    )


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def chats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatFormat]:
    """The chat format of every style."""
    folder = tmp_path_factory.mktemp("chats")
    metaspace = request.param == "metaspace"
    return {style: write_chat(folder / style, style, metaspace=metaspace) for style in STOPS}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """One that does not rewrite what came before."""
    return write_chat(tmp_path_factory.mktemp("chat"), "thinking")


CALLED = '<tool_call>{"name":"weather","arguments":{"city":"Paris"}}</tool_call>'
THOUGHT = "<think>\nthe fox jumps\n</think>\n\n"
KINDS = {
    "text": ("it is sunny", Answer("it is sunny"), NEXT),
    "spaces": (" \n it is sunny \n", Answer(" \n it is sunny \n"), NEXT),
    "call": (CALLED, Answer("", tool_calls=(CALL,)), [RESULT]),
    "text and call": ("the weather" + CALLED, Answer("the weather", tool_calls=(CALL,)), [RESULT]),
    "reasoning": (THOUGHT + "sunny", Answer("sunny", "the fox jumps"), NEXT),
    "reasoning and call": (THOUGHT + CALLED, Answer("", "the fox jumps", (CALL,)), [RESULT]),
}
"""What is sampled, how it is read, and the messages that come next."""
GOES_ON = {
    "qwen2": {"text", "spaces", "call", "text and call"},
    "qwen3": {"text", "spaces", "call", "text and call", "reasoning and call"},
    "thinking": set(KINDS),
    "deepseek": set(),
    "llama3": {"text", "spaces", "call"},
    "mistral": {"text", "spaces", "call"},
    "gemma": {"text", "spaces"},
    "gpt_oss": {"call", "reasoning and call"},
    "plain": set(),
}
"""What each template renders as the shorter conversation and something behind it."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STOPS)
def test_what_is_appended_are_tokens_of_the_whole_rendering(
    style: str, kind: str, chats: dict[str, ChatFormat]
):
    chat = chats[style]
    text, answer, new = KINDS[kind]
    rollout = Rollout(chat, TOOLS if "call" in kind else None)
    for turn in range(3):
        before = rollout.context.token_ids.tolist()
        answered = [*tokens(chat, text), stop(chat, style, call="call" in kind)]
        context = rollout.answer(answered, answer, new)
        assert (context.kept > 0) == (kind in GOES_ON[style])
        assert context.branch == (0 if context.kept else turn + 1)
        whole = chat.prompt(rollout.messages, rollout.tools)
        if context.kept:
            assert context.token_ids[: context.kept].tolist() == before + answered
            behind = len(context.appended)
            assert context.appended.tolist() == whole[-behind:]
            assert whole[-behind - 1] == answered[-1]
        else:
            assert context.token_ids.tolist() == whole


@pytest.mark.parametrize("style", STOPS)
def test_what_comes_behind_does_not_depend_on_the_tokens_that_were_sampled(
    style: str, chats: dict[str, ChatFormat]
):
    """Answers of random tokens, whose text has other tokens, ended by the model or cut."""
    chat, draw = chats[style], random.Random(style)
    end = stop(chat, style)
    behind: dict[bool, list[int]] = {}
    went_on = 0
    for number in range(40):
        rollout = Rollout(chat)
        ended = number % 2 == 0
        for _ in range(2):
            before, size = rollout.context, len(rollout.context.token_ids)
            answered = [draw.randrange(260, 400) for _ in range(draw.randrange(1, 8))]
            answered += [end] if ended else []
            context = rollout.answer(answered, Answer(chat.text(answered)), NEXT)
            if context.kept:
                went_on += 1
                assert context.kept == size + len(answered)
                assert context.token_ids[:size].tolist() == before.token_ids.tolist()
                assert context.token_ids[size : context.kept].tolist() == answered
                assert behind.setdefault(ended, context.appended.tolist()) == context.appended.tolist()
            else:
                assert context.token_ids.tolist() == chat.prompt(rollout.messages)
    if "text" not in GOES_ON[style]:
        assert True not in behind
    else:
        assert went_on > 60
        assert behind[False] == [end, *behind[True]]


def test_sampled_tokens_are_kept_where_their_text_has_others(chat: ChatFormat):
    rollout = Rollout(chat)
    letters = [chat.tokenizer.convert_tokens_to_ids(letter) for letter in "weather"]
    answered = [*letters, *chat.stop_token_ids]
    context = rollout.answer(answered, Answer("weather"), NEXT)
    assert context.token_ids[context.kept - len(answered) : context.kept].tolist() == answered
    assert len(context.token_ids) > len(chat.prompt(rollout.messages))
    assert chat.full_text(context.token_ids) == chat.rendering(rollout.messages)


def test_a_cut_answer_gets_the_end_token_that_the_template_writes(chat: ChatFormat):
    rollout = Rollout(chat)
    answered = tokens(chat, "it is sunny")
    context = rollout.answer(answered, Answer("it is sunny"), NEXT)
    assert context.kept
    assert context.appended[0] == chat.stop_token_ids[0]
    assert context.token_ids.tolist() == chat.prompt(rollout.messages)


def test_a_cut_reasoning_is_closed_only_if_its_text_proves_where(chat: ChatFormat):
    rollout = Rollout(chat)
    answered = tokens(chat, "<think>\nthe fox")
    context = rollout.answer(answered, Answer("", "the fox"), NEXT)
    assert not context.kept  # a line break begins what the template adds, and no token is certain there
    rollout = Rollout(chat)
    answered = tokens(chat, "<think>\nthe fox\n")
    context = rollout.answer(answered, Answer("", "the fox"), NEXT)
    assert context.kept
    assert chat.full_text(context.appended).startswith("</think>\n\n<|im_end|>")


def test_reasoning_inside_the_content_is_seen_to_be_dropped(tmp_path: Path):
    """Without a reasoning parser the template itself finds and drops it; a mark alone would not show that."""
    chat = write_chat(tmp_path, "qwen3")
    rollout = Rollout(chat)
    text = "<think>\nthe fox\n</think>\n\n sunny "
    answered = [*tokens(chat, text), *chat.stop_token_ids[-1:]]
    context = rollout.answer(answered, Answer(text), NEXT)
    assert (context.branch, context.kept) == (1, 0)
    assert "fox" not in chat.full_text(context.token_ids)


def test_another_end_token_than_the_templates_begins_a_new_branch(tmp_path: Path):
    chat = write_chat(tmp_path, "llama3")
    rollout = Rollout(chat, TOOLS)
    eom, eot = (chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|eom_id|>", "<|eot_id|>"))
    assert not rollout.answer([300, eom], Answer("", tool_calls=(CALL,)), [RESULT]).kept
    assert rollout.answer([300, eot], Answer("", tool_calls=(CALL,)), [RESULT]).kept


def test_a_call_in_other_white_space_is_kept_as_it_was_sampled(tmp_path: Path):
    chat = write_chat(tmp_path, "qwen2")
    rollout = Rollout(chat, TOOLS)
    text = '<tool_call>{"arguments":{"city":"Paris"},"name":"weather"}</tool_call>'
    answered = [
        *tokens(chat, text),
        chat.tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    context = rollout.answer(answered, Answer("", tool_calls=(CALL,)), [RESULT, RESULT])
    assert context.kept
    assert text in chat.full_text(context.token_ids)
    assert chat.full_text(context.appended).startswith("\n<|im_start|>user<tool_response>\n25 degrees")


def test_end_tokens_inside_arguments_do_not_end_the_answer(tmp_path: Path):
    chat = write_chat(tmp_path, "qwen2")
    rollout = Rollout(chat, TOOLS)
    call = ToolCall("weather", '{"city": "<|im_end|>", "days": 3}')
    stop = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    context = rollout.answer([300, stop], Answer("hm", tool_calls=(call,)), [RESULT])
    assert context.kept
    assert chat.full_text(context.appended).startswith("\n<|im_start|>user<tool_response>")


def test_edited_history_begins_a_new_branch(chat: ChatFormat):
    rollout = Rollout(chat)
    stop = chat.stop_token_ids[0]
    rollout.answer([300, stop], Answer(chat.text([300])), NEXT)
    first = rollout.messages
    rollout.messages = [{"role": "user", "content": "something else"}, *first[1:]]
    edited = rollout.conversation.next(rollout.messages)
    assert (edited.branch, edited.kept) == (1, 0)
    answer = first[1] | {"content": "what I would have said"}
    assert rollout.conversation.next([first[0], answer, *first[2:]]).branch == 2
    assert rollout.conversation.next([*first[2:]]).branch == 3


def test_reasoning_that_is_not_handed_back_begins_a_new_branch(chat: ChatFormat):
    rollout = Rollout(chat)
    rollout.told.answer = Answer("sunny", "the fox")
    message = rollout.conversation.sampled(rollout.context, [300, chat.stop_token_ids[0]])
    assert message == {"role": "assistant", "content": "sunny", "reasoning_content": "the fox"}
    kept = {"role": "assistant", "content": "sunny"}
    assert not rollout.conversation.next([QUESTION, kept, *NEXT]).kept


def test_other_tools_begin_a_new_branch(chat: ChatFormat):
    rollout = Rollout(chat, TOOLS)
    rollout.tools = None
    assert not rollout.answer([300, chat.stop_token_ids[0]], Answer(chat.text([300])), NEXT).kept


def test_messages_as_clients_write_them_are_the_same(chat: ChatFormat):
    rollout = Rollout(chat, TOOLS)
    rollout.told.answer = Answer("", "the fox", (CALL,))
    message = rollout.conversation.sampled(rollout.context, [300, chat.stop_token_ids[0]])
    call = message["tool_calls"][0]
    function = {"name": "weather", "arguments": '{"city":"Paris"}'}
    shown = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "reasoning": "the fox",
        "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
    }
    result = RESULT | {"tool_call_id": call["id"], "content": [{"type": "text", "text": "25 degrees"}]}
    context = rollout.conversation.next([QUESTION, shown, result], TOOLS)
    assert context.kept == len(rollout.context.token_ids) + 2
    assert chat.full_text(context.appended).count("25 degrees") == 1


def test_a_second_way_on_gets_a_branch_that_begins_with_the_same_tokens(chat: ChatFormat):
    rollout = Rollout(chat)
    letters = [chat.tokenizer.convert_tokens_to_ids(letter) for letter in "weather"]
    first = rollout.answer([*letters, *chat.stop_token_ids], Answer("weather"), NEXT)
    again = rollout.conversation.next(rollout.messages)
    assert (first.branch, again.branch, again.kept) == (0, 1, 0)
    assert again.token_ids.tolist() == first.token_ids.tolist()
    other = rollout.conversation.next([*rollout.messages[:2], {"role": "user", "content": "oh"}])
    assert other.branch == 2
    assert other.token_ids[: first.kept].tolist() == first.token_ids[: first.kept].tolist()
    rollout.conversation.sampled(first, [300])
    with pytest.raises(ValueError, match="has one answer"):
        rollout.conversation.sampled(first, [301])


def test_a_replay_gives_the_same_contexts_and_messages(chat: ChatFormat):
    draw = random.Random(0)
    answers = [[draw.randrange(chat.tokenizer.vocab_size) for _ in range(5)] for _ in range(20)]

    def play() -> tuple[list[Any], list[Any]]:
        rollout = Rollout(chat, TOOLS)
        contexts = [
            rollout.answer([*ids, *chat.stop_token_ids], Answer(chat.text(ids), "", (CALL,)), [RESULT])
            for ids in answers
        ]
        return [(c.branch, c.kept, c.token_ids.tolist()) for c in contexts], rollout.messages

    assert play() == play()


def test_conversations_that_take_turns_go_on_from_what_is_recorded(chat: ChatFormat):
    """Only the last context is at hand; a branch that goes on after another one is asked for again."""
    one, other = Rollout(chat), Rollout(chat)
    other.conversation, other.recorded, other.told = one.conversation, one.recorded, one.told
    other.messages = [{"role": "user", "content": "another question"}]
    other.context = other.conversation.next(other.messages)
    whole: dict[int, list[int]] = {}
    for number in range(6):
        rollout = (one, other)[number % 2]
        before = [*rollout.context.token_ids.tolist(), 300 + number, chat.stop_token_ids[0]]
        context = rollout.answer(before[-2:], Answer(chat.text(before[-2:])), NEXT)
        assert (context.branch, context.kept) == (number % 2, len(before))
        assert context.token_ids[: context.kept].tolist() == before
        assert before[: len(whole.get(number % 2, []))] == whole.get(number % 2, [])
        whole[number % 2] = before


@pytest.mark.parametrize(
    "changed",
    [
        {"arguments": {"days": True}},
        {"arguments": {"days": 1.5}},
        {"name": "climate"},
    ],
)
def test_a_message_that_is_changed_in_place_is_another_one(chat: ChatFormat, changed: dict[str, Any]):
    histories = Histories()
    function: dict[str, Any] = {"name": "weather", "arguments": {"days": 1}}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    messages = [QUESTION, call, RESULT]
    first = list(histories.of(messages))
    assert list(histories.of(messages)) == first == list(Histories().of(messages))
    function |= changed
    second = list(histories.of(messages))
    assert second == list(Histories().of(messages))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]
    assert list(histories.of(messages[:1])) == first[:2]


def test_forgotten_branches_are_rendered_anew(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversation, "LARGEST_NUMBER_OF_BRANCHES", 3)
    kept = []
    told, recorded = Told(), Recorded()
    several = Conversation(chat, recorded.__getitem__, told)
    openings = [[{"role": "user", "content": f"question {number}"}] for number in range(4)]
    for messages in openings:
        told.answer = Answer("weather")
        context = several.next(messages)
        recorded.answered(context, [300, chat.stop_token_ids[0]])
        several.sampled(context, [300, chat.stop_token_ids[0]])
    for messages in openings:
        kept.append(several.next([*messages, {"role": "assistant", "content": "weather"}, *NEXT]).kept > 0)
    assert kept == [False, True, True, True]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny Llama without gradients, whose vocabulary is larger than the tokenizers'."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return (
        random_model(LlamaConfig(vocab_size=640, initializer_range=0.3, **sizes)).eval().requires_grad_(False)
    )


@pytest.mark.parametrize("style", ["qwen3", "thinking"])
def test_logprobs_of_a_branch_are_those_of_sampling_step_by_step(
    style: str, model: PreTrainedModel, tmp_path: Path
):
    """Over tool calls and questions; one template drops the reasoning before a question, one does not."""
    chat = write_chat(tmp_path, style)
    rollout = Rollout(chat, TOOLS)
    generator = torch.Generator().manual_seed(0)
    branches: dict[int, tuple[list[int], dict[int, float]]] = {}
    for turn in range(5):
        context = rollout.context
        token_ids, logprobs = branches.setdefault(context.branch, ([], {}))
        assert token_ids == context.token_ids[: context.kept].tolist()
        token_ids[:] = context.token_ids.tolist()
        answered: list[int] = []
        for position in range(len(token_ids), len(token_ids) + 4):
            logits = model(torch.tensor([[*token_ids, *answered]])).logits[0, -1].float()
            chosen = int(torch.multinomial(logits[:500].softmax(-1), 1, generator=generator))
            if position == len(token_ids) + 3:
                chosen = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
            logprobs[position] = float(logits.log_softmax(-1)[chosen])
            answered.append(chosen)
        token_ids += answered
        calls = (CALL,) if turn % 2 == 0 else ()
        answer = Answer(chat.text(answered), "the fox", calls)
        rollout.answer(answered, answer, [RESULT] if calls else NEXT)
    assert len(branches) == {"qwen3": 3, "thinking": 1}[style]
    for token_ids, logprobs in branches.values():
        whole = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
        for position, logprob in logprobs.items():
            assert float(whole[position - 1, token_ids[position]]) == pytest.approx(logprob, abs=1e-4)
