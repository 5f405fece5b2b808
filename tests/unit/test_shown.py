"""What a chat template leaves out is refused, by field and message; flags of other programs are obeyed."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import GEMMA, LLAMA3, MISTRAL, QWEN2, QWEN3, THINKING
from test_rendering import CHATML, chat, tokenizer_of

from cairn.run.data_sets import BadRecord
from cairn.trainer.data.records import FLAGS, problem_of
from cairn.trainer.data.rendering import Encoder
from cairn.trainer.data.shown import METADATA

KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of Qwen 2.5's: a role that it does not know is left out, and so is reasoning."""
NAMED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.name %} {{ m.name }}{% endif %}{% if m.channel %} {{ m.channel }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Shows two fields more, if they are there."""
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny"}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {}}}


def said(
    template: str, *messages: Mapping[str, Any], ignored: tuple[str, ...] = (), **beside: Any
) -> str | None:
    """What is said of a record of these messages; None if it is taken."""
    encoder = Encoder(tokenizer_of(template), ignored=ignored)
    try:
        encoder.turns([{"messages": list(messages), **beside}], [0])
    except BadRecord as error:
        return str(error).removeprefix("record 0: ")
    return None


LEFT_OUT = {
    "developer": (
        KNOWN_ROLES,
        [{"role": "developer", "content": "Be kind."}, USER, ANSWER],
        "the content of message 0 (developer); write the role as 'system'",
    ),
    "function": (
        KNOWN_ROLES,
        [USER, CALLED, RESULT | {"role": "function"}, ANSWER],
        "the content of message 2 (function); write the role as 'tool'",
    ),
    "model": (
        KNOWN_ROLES,
        [USER, {"role": "model", "content": "HELLO"}, USER, ANSWER],
        "the content of message 1 (model); write the role as 'assistant'",
    ),
    "other role": (
        KNOWN_ROLES,
        [{"role": "narrator", "content": "Once."}, USER, ANSWER],
        "the content of message 0 (narrator); leave it out",
    ),
    "reasoning": (
        KNOWN_ROLES,
        [USER, ANSWER | {"reasoning_content": "Hm."}],
        "the reasoning (reasoning_content, reasoning, thinking) of message 1 (assistant)",
    ),
    "only reasoning": (
        KNOWN_ROLES,
        [USER, {"role": "assistant", "content": "", "thinking": "Hm."}],
        "the reasoning (reasoning_content, reasoning, thinking) of message 1 (assistant)",
    ),
    "earlier reasoning": (
        KNOWN_ROLES,
        [USER, ANSWER | {"reasoning": "Hm."}, USER, ANSWER],
        "of message 1 (assistant)",
    ),
    "second call": (
        LLAMA3,
        [USER, {**CALLED, "tool_calls": [CALL, CALL]}],
        "tool_calls of message 1 (assistant)",
    ),
    "text beside a call": (
        LLAMA3,
        [USER, {**CALLED, "content": "Let me see."}],
        "the content of message 1 (assistant); put it into a message of its own",
    ),
    "calls": (
        CHATML,
        [USER, CALLED, RESULT, ANSWER],
        "it has tool_calls, and the chat template takes no notice of them",
    ),
    "arguments": (
        KNOWN_ROLES.replace("{{ call.function.arguments | tojson }}", ""),
        [USER, CALLED],
        "the arguments of tool_calls of message 1",
    ),
    "thought": (
        CHATML,
        [USER, ANSWER | {"thought": "Hm."}],
        "message 1 (assistant) has the field 'thought', which the chat template does not show; if ",
    ),
    "near": (CHATML, [USER, ANSWER | {"contents": "Hm."}], "did you mean 'content'?"),
    "loss_scale": (
        CHATML,
        [USER, ANSWER | {"loss_scale": 0.5}],
        "whether a turn is learned is said by train, weight, loss",
    ),
    "trained": (CHATML, [USER, ANSWER | {"trained": False}], "whether a turn is learned is said by train"),
    "object": (CHATML, [USER, ANSWER | {"function_call": {"name": "f"}}], "has the field 'function_call'"),
    "image": (
        CHATML,
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, ANSWER],
        "the content of message 0 of messages (user) has a part of type 'image_url'; only text",
    ),
    "thinking part": (
        CHATML,
        [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}],
        "a part of type 'thinking'; give reasoning as reasoning_content",
    ),
    "tool_use part": (
        CHATML,
        [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}],
        "give calls as tool_calls",
    ),
    "bare part": (CHATML, [{"role": "user", "content": ["Hi"]}, ANSWER], "a part without text"),
    "a call's list": (
        KNOWN_ROLES,
        [USER, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        "tool_calls that are not",
    ),
    "none": (CHATML, [], "its messages is an empty list, so there is nothing to learn"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_template_does_not_show_is_refused(name: str):
    template, messages, what = LEFT_OUT[name]
    assert what in (said(template, *messages) or "")


SHOWN = {
    "roles": (CHATML, [{"role": "developer", "content": "Be kind."}, USER, ANSWER]),
    "renamed": (GEMMA, [USER, ANSWER]),
    "results": (QWEN2, [USER, CALLED, RESULT, RESULT, ANSWER]),
    "reasoning of its own turn": (
        QWEN3,
        [USER, ANSWER | {"reasoning_content": "Hm."}, USER, ANSWER | {"reasoning_content": "So."}],
    ),
    "inline thoughts of its own turn": (
        QWEN3,
        chat("Hi", "<think>\nHm.\n</think>\n\n42", "Hi", "<think>\nSo.\n</think>\n\n1")["messages"],
    ),
    "all reasoning": (THINKING, [USER, ANSWER | {"thinking": "Hm."}, USER, ANSWER]),
    "names": (CHATML, [USER | {"name": "Bob"}, ANSWER]),
    "names that are shown": (NAMED, [USER | {"name": "Bob"}, ANSWER]),
    "a field that is shown": (NAMED, [USER, ANSWER | {"channel": "final"}]),
    "empty": (CHATML, [USER, {"role": "assistant", "content": " "}]),
    "nothing": (
        CHATML,
        [USER, ANSWER | {"refusal": None, "audio": None, "annotations": [], "function_call": None}],
    ),
    "metadata": (
        CHATML,
        [USER | dict.fromkeys(METADATA, "x"), ANSWER | {"toxic": False, "token_counter": 3, "_row": "y"}],
    ),
    "parts": (
        CHATML,
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b"}, {"type": "text", "text": "c"}],
            },
        ],
    ),
    "nulls": (KNOWN_ROLES, [USER, CALLED | {"content": None}, RESULT, ANSWER]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_template_shows_is_taken(name: str):
    template, messages = SHOWN[name]
    assert said(template, *messages) is None


def test_tools_that_are_shown_somewhere_are_taken_and_others_refused():
    assert said(QWEN2, USER, ANSWER, tools=[TOOL]) is None
    assert said(MISTRAL, USER, ANSWER, USER, ANSWER, tools=[TOOL]) is None
    nameless = KNOWN_ROLES + "{% if tools %}There are tools.{% endif %}"
    assert "does not show their names" in (said(nameless, USER, ANSWER, tools=[TOOL]) or "")


def test_a_field_can_be_left_out_by_a_setting():
    record = [USER, ANSWER | {"thought": "Hm.", "train_on": True}]
    assert "'thought'" in (said(CHATML, *record, ignored=("train_on",)) or "")
    assert "'train_on'" in (said(CHATML, *record, ignored=("thought",)) or "")
    assert said(CHATML, *record, ignored=("thought", "train_on")) is None


def test_text_parts_are_joined():
    tokenizer = tokenizer_of(CHATML)
    parts = [{"type": "output_text", "text": "b"}, {"type": "text", "text": "c"}]
    (sample,) = Encoder(tokenizer).whole([{"messages": [USER, {"role": "assistant", "content": parts}]}], [0])
    assert tokenizer.decode(sample.token_ids).endswith("<|im_start|>assistant\nb\nc<|im_end|>\n")


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_the_template_shows_all_of_what_is_taken_or_it_is_refused(data: st.DataObject):
    """Of random conversations of known and unknown roles and fields: each text is in one of the samples."""
    texts = st.text(st.sampled_from("abcdefgh"), min_size=6, max_size=9)
    template = data.draw(st.sampled_from([CHATML, KNOWN_ROLES, NAMED, QWEN2, QWEN3, THINKING, GEMMA]))
    messages: list[dict[str, Any]] = []
    for i in range(data.draw(st.integers(1, 3))):
        asks = data.draw(st.sampled_from(["user", "user", "system", "developer", "critic"])) if i else "user"
        messages.append({"role": asks, "content": data.draw(texts)})
        answer = {"role": "assistant", "content": data.draw(texts)}
        field = data.draw(st.sampled_from([None, "reasoning_content", "thought", "channel", "plan"]))
        messages.append(answer | ({field: data.draw(texts)} if field else {}))
    tokenizer = tokenizer_of(template)
    try:
        (samples,) = Encoder(tokenizer).turns([{"messages": messages}], [0])
    except BadRecord:
        return
    whole = "\0".join(tokenizer.decode(sample.token_ids) for sample in samples)
    for message in messages:
        for name, text in message.items():
            assert name == "role" or text in whole, (message, whole)


# Flags


def learned_of(*messages: Mapping[str, Any], **beside: Any) -> list[str]:
    """The texts of the turns that are learned."""
    tokenizer = tokenizer_of(CHATML)
    (sample,) = Encoder(tokenizer).whole([{"messages": list(messages), **beside}], [0])
    text = tokenizer.decode(sample.token_ids[sample.loss_mask])
    return text.split("<|im_end|>\n")[:-1]


WRONG, RIGHT = {"role": "assistant", "content": "WRONG"}, {"role": "assistant", "content": "right"}


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_all_names_are_obeyed(name: str, as_number: bool):
    kind = int if as_number else bool
    no, yes = (kind(value is FLAGS[name]) for value in (False, True))
    assert learned_of(USER, WRONG | {name: no}, USER, RIGHT | {name: yes}) == ["right"]
    assert learned_of(USER, WRONG | {name: no}, USER, RIGHT | {name: None}) == ["right"]
    assert learned_of(USER | {name: yes}, WRONG | {name: no}) == ["<|im_start|>user\nHi"]
    assert learned_of(USER, WRONG, USER, RIGHT, **{name: [no, no, no, yes]}) == ["right"]
    assert learned_of(USER, WRONG | {name: yes}, **{name: [no, no]}) == ["WRONG"]
    assert learned_of(USER, RIGHT, **{name: yes}) == ["right"]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"messages": [USER, ANSWER | {"loss": 0.5}]}, "has loss = 0.5, which must be true or false"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "has weight = 0.5, which must be 0 or 1"),
        ({"messages": [USER, ANSWER | {"masked": "no"}]}, "has masked = 'no', which must be true or false"),
        (
            {"messages": [USER, ANSWER | {"train": True, "loss": 0}]},
            "has train = True and loss = 0, which contra",
        ),
        ({"messages": [USER, ANSWER | {"train": True, "masked": True}]}, "which contradict each other"),
        (
            {"messages": [USER, ANSWER], "loss_mask": [1]},
            "its loss_mask has 1 values, and there are 2 messages",
        ),
        ({"messages": [USER, ANSWER], "loss_mask": [0, 2]}, "its loss_mask has the value 2"),
        (
            {"messages": [USER, ANSWER], "trainable": False},
            "its trainable = False says that nothing of it is",
        ),
        ({"messages": [USER, ANSWER], "weight": 0.5}, "its weight is 0.5, and records have no weights of"),
        ({"prompt": "a", "completion": "b", "loss_mask": [0, 1]}, "it has loss_mask beside texts"),
    ],
)
def test_flags_that_can_not_be_obeyed_are_refused(record: dict[str, Any], what: str):
    assert what in (problem_of(record) or "")


def test_measurements_beside_the_messages_are_no_flags():
    assert problem_of({"messages": [USER, ANSWER], "loss": 1.25, "train": "part 1"}) is None
    assert problem_of({"messages": [USER, ANSWER | {"train": True, "weight": 1, "loss": 1}]}) is None


def test_flags_beside_a_system_prompt_in_a_field_of_its_own():
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "no"}, {"from": "gpt", "value": "yes"}]
    tokenizer = tokenizer_of(CHATML)
    record = {"conversations": said, "system": "Be kind.", "loss_mask": [0, 0, 1]}
    (sample,) = Encoder(tokenizer).whole([record], [0])
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "yes<|im_end|>\n"
