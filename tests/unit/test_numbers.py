"""Numbers of JSON in the texts that are learned: as they were written, or refused."""

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from cairn.orchestrator.completion.chat import ChatFormat
from cairn.run.conversations import for_template
from cairn.run.records.numbers import (
    NESTED_AT_MOST,
    FloatAsWritten,
    NumberChanged,
    dumps,
    has_written_numbers,
    parse,
    parse_again,
    show_as_written,
)

MODEL = Path(__file__).resolve().parents[2] / "configs" / "reverse_text" / "model"
WRITTEN = ["1.10", "1E5", "1e400", "-1e400", "-0", "1e-400", "1e16", "0.1e1", "1.0e-12", "100.00"]
WRITTEN += ["NaN", "Infinity", "-Infinity", "0.70000000000000000001", "12345678901234567890.5"]
PLAIN = ["0.7", "-0.0", "1e-12", "3.141592653589793", "12345678901234567", "0", "1", "1.0", "-2.5", "9" * 30]

numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@pytest.mark.parametrize("text", [*WRITTEN, *PLAIN])
def test_a_number_is_shown_as_it_is_written(text: str):
    """And is that number, however it is copied."""
    value = parse(text)
    assert has_written_numbers(value) == (text in WRITTEN)
    assert value == float(text) or value != value or value == int(text)
    for one in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value)), parse_again(text)):
        assert dumps({"x": [one, "1.10"]}) == f'{{"x": [{text}, "1.10"]}}'


@given(st.lists(numbers, max_size=6))
def test_any_numbers_come_back(texts: list[str]):
    """Also where they are the same, and beside texts that look like them."""
    text = json.dumps({"keys": texts})[:-1] + ', "values": [' + ", ".join(texts) + "]}"
    assert dumps(parse(text)) == text
    assert dumps(parse_again(text)) == text


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(json.dumps)
values = st.recursive(
    numbers | texts | st.sampled_from(["true", "false", "null", '"2024-05-01"', '"[1]"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.dictionaries(texts, inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=8,
)


@given(values)
def test_any_value_comes_through_a_template(text: str):
    """Bit for bit but for the escapes that a template leaves out: no number, null or order changes."""
    (shown,) = render("{{ messages[0].x | tojson }}", [{"x": parse(text)}])
    assert shown == dumps(parse(text), ensure_ascii=False)
    assert dumps(parse(shown)) == text


TEMPLATES = {
    "tojson": ("{{ messages[0].x | tojson }}", "[1.10, -0, 1e400, 5]"),
    "string": ("{% for x in messages[0].x %}<{{ x }}|{{ x | string }}>{% endfor %}", None),
    "kinds": (
        "{% for x in messages[0].x %}{{ '\"' ~ x ~ '\"' if x is string else x | tojson }} {% endfor %}",
        "1.10 -0 1e400 5 ",
    ),
}


def render(template: str, messages: list[Any]) -> list[str]:
    """What a chat template makes of conversations of these messages."""
    conversations = [[one] for one in messages]
    return show_as_written(
        lambda value: render_jinja_template(value, chat_template=template)[0], conversations
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_shows(name: str):
    """It sees numbers of the same types; conversations without such numbers are shown as ever."""
    template, expected = TEMPLATES[name]
    expected = expected or "<1.10|1.10><-0|-0><1e400|1e400><5|5>"
    message = {"x": parse("[1.10, -0, 1e400, 5]")}
    assert render(template, [message, {"x": [1.5]}])[0] == expected
    assert (
        render(template, [{"x": [1.5]}]) == render_jinja_template([[{"x": [1.5]}]], chat_template=template)[0]
    )


@pytest.mark.parametrize(
    "template", ["{{ messages[0].x * 2 }}", "{{ '%.1f' % messages[0].x }}", "{{ messages[0].x > 1 }}"]
)
def test_a_template_that_computes_with_a_number_is_refused(template: str):
    with pytest.raises(NumberChanged, match=r"the numbers 1\.10, and what shows them computes"):
        render(template, [{"x": parse("1.10")}])


def test_arguments_as_text_keep_their_numbers():
    """What can't be kept as a value stays text."""

    def shown(arguments: str) -> Any:
        call = {"function": {"name": "f", "arguments": arguments}}
        message = for_template({"role": "assistant", "content": None, "tool_calls": [call]})
        return message["tool_calls"][0]["function"]["arguments"]

    assert dumps(shown('{"b": 1.10, "a": null}')) == '{"b": 1.10, "a": null}'
    for text in ('{"a": 1, "a": 2}', '{"a": "\\ud83d"}', "[" * 5000 + "]" * 5000, "plain"):
        assert shown(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' is there twice in one object"),
        ('["\\ud83d"]', r"\\ud83d is half of a surrogate pair, and no character"),
        ('{"\\udc00": 1}', r"\\udc00 is half of a surrogate pair"),
        ("9" * 5000, "Exceeds the limit"),
        ("[" * (NESTED_AT_MOST + 1) + "]" * (NESTED_AT_MOST + 1), "it is nested too deeply: more than"),
        ('{"a": ' * 100000 + "1" + "}" * 100000, "it is nested too deeply: more than"),
        ("{} {}", "Extra data"),
    ],
)
def test_what_can_not_be_kept_is_refused(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_what_looks_like_that_is_kept():
    """A whole surrogate pair; text with the same bytes; brackets that are text; as many levels as may be."""
    assert parse('"\\ud83d\\ude00"') == "\U0001f600"
    assert parse('"\\\\ud83d"') == "\\ud83d"
    brackets = "[{" * NESTED_AT_MOST
    assert parse(json.dumps(brackets)) == brackets
    deep = "[" * NESTED_AT_MOST + "1.10" + "]" * NESTED_AT_MOST
    assert dumps(parse(deep)) == deep
    assert type(parse("1.1")) is float
    assert type(parse("1.10")) is FloatAsWritten


def test_prompts_show_numbers_as_they_are_written(tmp_path: Path):
    """Also those that a model wrote into its own calls; their tokens are those of the text."""
    shutil.copytree(MODEL, tmp_path / "model")
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    chat = ChatFormat(tmp_path / "model")
    texts = []
    for number in ("1.10", "1.5"):
        call = {"function": {"name": "f", "arguments": f'{{"x": {number}}}'}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        texts.append(chat.rendering(messages))
        assert f'"x": {number}' in texts[-1]
        assert chat.full_text(chat.prompt(messages)) == chat.full_text(
            chat.tokenizer(texts[-1], add_special_tokens=False)["input_ids"]
        )
    assert texts[0].replace("1.10", "1.5") == texts[1]
