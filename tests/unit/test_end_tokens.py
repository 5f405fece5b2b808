"""The tokens that end an answer, from all places of a model's folder that name some."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import EXAMPLE
from transformers import AutoTokenizer

from cairn.orchestrator.completion.chat import ChatFormat
from cairn.run.conversations import TOKENIZER, end_tokens
from cairn.run.errors import CairnError, UsageError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_union_of_the_places_with_where_each_is_named(tmp_path: Path) -> None:
    """T16: a base model whose tokenizer, generation_config.json and config.json name different tokens."""
    folder = write(
        tmp_path, generation_config={"eos_token_id": [7, 9]}, config={"eos_token_id": 5, "pad_token_id": 1}
    )
    assert end_tokens(folder, 9) == {
        5: ("config.json",), 7: ("generation_config.json",), 9: (TOKENIZER, "generation_config.json")
    }  # fmt: skip
    assert end_tokens(write(tmp_path, config={"text_config": {"eos_token_id": [3]}}), None).keys() == {
        3,
        7,
        9,
    }
    assert end_tokens(tmp_path / "nothing", None) == {}


def test_a_rollout_ends_at_any_of_them(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    tokenizer.save_pretrained(tmp_path)
    write(
        tmp_path, generation_config={"eos_token_id": [42]}, config={"eos_token_id": 43, "model_type": "qwen3"}
    )
    assert ChatFormat(tmp_path).stop_token_ids == tuple(sorted({tokenizer.eos_token_id, 42, 43}))


@pytest.mark.parametrize("wrong", ["</s>", True, 1.5, [1, "2"], {"id": 1}])
def test_what_is_no_token_id_is_refused_with_file_and_value(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"config\.json: has eos_token_id = .*must be a token id"):
        end_tokens(write(tmp_path, config={"eos_token_id": wrong}), 1)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=JSON, eos=JSON)
def test_any_content_gives_token_ids_or_an_error_that_names_the_file(
    tmp_path: Path, content: Any, eos: Any
) -> None:
    for files in (
        {"config": content, "generation_config": {}},
        {"config": {}, "generation_config": {"eos_token_id": eos}},
    ):
        try:
            found = end_tokens(write(tmp_path, **files), None)
        except CairnError as error:
            named, found = str(tmp_path) in str(error), {}
        else:
            named = True
        assert named
        assert all(type(token_id) is int and token_id >= 0 for token_id in found)
