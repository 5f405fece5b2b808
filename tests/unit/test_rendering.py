"""What of a conversation is learned, by its text; and values of tool calls, which are shown as written."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import LLAMA3, MISTRAL, PLAIN, QWEN2, QWEN3, STOPS, THINKING, write_chat
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord
from cairn.run.records.numbers import parse
from cairn.trainer.data.rendering import Encoder

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS_THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set r = m.reasoning_content if m.reasoning_content is string else (m.content.split('</think>')[0]"
    ".split('<think>')[-1].strip('\n') if '</think>' in m.content else '') %}"
    "{% set t = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant\n"
    "{% if loop.last or r %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{{ t }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""In the manner of Qwen3-Thinking-2507: the generation prompt opens the reasoning."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>")
CORPUS = [
    "Hello, how are you?\n\nFine, thank you.\n\n\nThe date is 2024-05-01.\n",
    "<think>\nLet me see.\n</think>\n\nThe answer is 42.\n",
    '{"name": "set_zoom", "arguments": {"zoom": 0.7}}\n\n',
    "user assistant system developer tool\n\n\n\n",
] * 50


@cache
def merging() -> Tokenizer:
    """A byte-level BPE that merges line ends, as those of Qwen and Llama 3 do."""
    made = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\w]?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+")
    split = pre_tokenizers.Split(words, "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """A tokenizer that merges line ends, with this template."""
    found = PreTrainedTokenizerFast(tokenizer_object=merging(), eos_token="<|im_end|>", bos_token=SPECIAL[0])
    found.chat_template = template
    return found


def chat(*turns: str) -> dict[str, Any]:
    """A record of user, assistant, user, ..."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def learned(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """A sample's text, what is learned in double brackets."""
    text, inside = "", False
    for token, is_learned in zip(sample.token_ids, sample.loss_mask, strict=True):
        if bool(is_learned) != inside:
            text += "]]" if inside else "[["
            inside = not inside
        text += tokenizer.decode([token])
    return text + "]]" * inside


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (
            CHATML,
            ("Hi", "Hello"),
            ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello<|im_end|>\n]]"],
        ),
        (CHATML, ("Hi", ""), ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[<|im_end|>\n]]"]),
        (
            CHATML,
            ("Hi", "\nHello"),
            ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant[[\n\nHello<|im_end|>\n]]"],
        ),
        (
            CHATML,
            ("Hi", "\n\nHello", "And?", "Fine", "So?", "\nYes"),
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant[[\n\n\nHello<|im_end|>\n]]"
                "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n[[Fine<|im_end|>\n]]"
                "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant[[\n\nYes<|im_end|>\n]]"
            ],
        ),
        (
            OPENS_THINKING,
            ("Hi", "Hello"),
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think"
                "[[>\n\n</think>\n\nHello<|im_end|>\n]]"
            ],
        ),
        (
            OPENS_THINKING,
            ("17+25?", "<think>\nAdd them.\n</think>\n\n42"),
            [
                "<|im_start|>user\n17+25?<|im_end|>\n<|im_start|>assistant\n<think>\n"
                "[[Add them.\n</think>\n\n42<|im_end|>\n]]"
            ],
        ),
        (
            OPENS_THINKING,
            ("Hi", "Hello", "And?", "Fine"),
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think"
                "[[>\n\n</think>\n\nHello<|im_end|>\n]]",
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
                "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think"
                "[[>\n\n</think>\n\nFine<|im_end|>\n]]",
            ],
        ),
    ],
)
def test_a_turn_begins_where_its_text_begins(template: str, turns: Sequence[str], expected: list[str]):
    """A token that holds the end of the prompt as well, such as two line ends, is learned."""
    tokenizer = tokenizer_of(template)
    (samples,) = Encoder(tokenizer).turns([chat(*turns)], [0])
    assert [learned(sample, tokenizer) for sample in samples] == expected


def test_a_template_that_asks_otherwise_than_it_answers_is_refused_with_both():
    """That of the distilled R1, which drops thoughts from what it renders."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
        "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    )
    with pytest.raises(BadRecord, match=r"record 0: .* it asks with '<think>\\n', and renders 'Hello<\|im_"):
        Encoder(tokenizer_of(template)).whole([chat("Hi", "Hello")], [0])


TEXTS = st.text(st.sampled_from("ab \n\tä中😀<>{}0"), max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_answer_is_learned_from_where_a_server_would_begin(data: st.DataObject):
    """Of every style: the sample is the text of the conversation, tokenised as transformers does; unlearned
    tokens are those of the prompt, and what is learned ends the text.

    This is told by comparing texts, and by another way than the code goes.
    """
    template = data.draw(st.sampled_from([CHATML, QWEN2, QWEN3, THINKING, LLAMA3, MISTRAL, PLAIN]))
    tokenizer = tokenizer_of(template)
    question, answer = data.draw(TEXTS), data.draw(TEXTS)
    messages = chat(question, answer)["messages"]
    (sample,) = Encoder(tokenizer).whole([{"messages": messages}], [0])
    whole: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert sample.token_ids.tolist() == whole["input_ids"]
    prompt: Any = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    start = int(sample.loss_mask.argmax())
    assert sample.loss_mask[start:].all()
    before = tokenizer.decode(sample.token_ids[:start], skip_special_tokens=False)
    upto = tokenizer.decode(sample.token_ids[: start + 1], skip_special_tokens=False)
    assert prompt.startswith(before.rstrip("\N{REPLACEMENT CHARACTER}"))  # which stands for parts of one
    assert len(upto) > len(prompt) or upto == prompt + "\N{REPLACEMENT CHARACTER}"


NUMBERS = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,12})(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(["-0", "-0.0", "1.10", "1E5", "1e400", "0.7", "1e-12", "3.141592653589793", "12e+0"]),
)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(
    lambda text: json.dumps(text, ensure_ascii=False)
)


def _lists(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]")


def _objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    found = st.dictionaries(STRINGS, inner, max_size=4)
    return found.map(lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}")


VALUES = st.recursive(
    st.one_of(NUMBERS, STRINGS, st.sampled_from(["null", "true", "false", "[]", "{}"])),
    lambda inner: st.one_of(_lists(inner), _objects(inner)),
    max_leaves=8,
)
"""Texts of JSON, with the white space that templates write."""


@pytest.fixture(scope="module")
def with_calls(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """A tokenizer whose template shows tools and calls."""
    return write_chat(tmp_path_factory.mktemp("qwen2"), "qwen2").tokenizer


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(arguments=_objects(VALUES), schema=_objects(VALUES), as_text=st.booleans())
def test_any_value_of_a_call_or_a_tool_is_learned_as_it_is_written(
    with_calls: PreTrainedTokenizerBase, arguments: str, schema: str, as_text: bool
):
    """Numbers in any spelling, nulls, keys in their order; as an object, and as text of an object."""
    call = {
        "type": "function",
        "function": {"name": "f", "arguments": arguments if as_text else parse(arguments)},
    }
    record = {
        "messages": [
            {"role": "user", "content": "Now?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parse(schema)}}],
    }
    (sample,) = Encoder(with_calls).whole([record], [0])
    text = with_calls.decode(sample.token_ids, skip_special_tokens=False)
    assert f'"parameters": {schema}}}}}\n' in text
    answer = with_calls.decode(sample.token_ids[sample.loss_mask], skip_special_tokens=False)
    assert f'{{"name": "f", "arguments": {arguments}}}' in answer


@pytest.mark.parametrize("style", STOPS)
@pytest.mark.parametrize("metaspace", [False, True])
def test_where_tokens_of_prompt_and_answer_are_apart_these_are_learned(
    tmp_path: Path, style: str, metaspace: bool
):
    """As it was found before, from tokens alone: what follows the prompt's tokens."""
    tokenizer = write_chat(tmp_path, style, metaspace=metaspace).tokenizer
    records = [chat("what is", answer) for answer in ("it is sunny", " 42", "the\nanswer", "ü😀")]
    apart = 0
    for record in records:
        messages = record["messages"]
        encoded = [
            tokenizer.apply_chat_template(
                messages[:n], tokenize=True, return_dict=True, add_generation_prompt=n == 1
            )
            for n in (1, 2)
        ]
        before, after = (one["input_ids"] for one in encoded)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if after[: len(before)] != before:
            continue
        apart += 1
        (sample,) = Encoder(tokenizer).whole([record], [0])
        assert sample.token_ids.tolist() == after
        assert sample.loss_mask.tolist() == [i >= len(before) for i in range(len(after))]
    assert apart or style in ("deepseek", "llama3")  # the one refuses all, the other merges line ends
