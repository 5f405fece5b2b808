"""Wrong entries of a model's files end in an error that says what is wrong, and in no raw one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_example

from cairn.config.model import ModelConfig
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.launch.plan.model import described, resolve_model
from cairn.run.conversations import end_tokens
from cairn.run.errors import CairnError

VALUES = st.sampled_from(
    [None, True, False, 0, -1, 3.5, float("nan"), float("inf"), "x", "", [], [1], {}, {"a": 1}, [{}], 10**30]
)
FIELDS = st.sampled_from(
    [
        *("tie_word_embeddings", "text_config", "quantization_config", "eos_token_id", "rope_scaling"),
        *("rope_parameters", "architectures", "model_type", "num_hidden_layers", "hidden_size", "vocab_size"),
        *("num_key_value_heads", "head_dim", "dtype", "torch_dtype", "max_position_embeddings", "unknown"),
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("right") / "model", tied=False)


def attempts(folder: Path, work: Path) -> list[Callable[[], object]]:
    """What reads a folder."""
    config = ModelConfig(name=str(folder))
    return [
        lambda: import_checkpoint(folder, work / "imported", "hf"),
        lambda: described(config),
        lambda: resolve_model(config, work / "cache"),
        lambda: end_tokens(folder, 1),
    ]


def only_readable_errors(folder: Path, work: Path) -> None:
    shutil.rmtree(work / "imported", ignore_errors=True)
    for attempt in attempts(folder, work):
        try:
            attempt()
        except (CairnError, FileNotFoundError) as error:
            said = str(error)
        else:
            said = "it was read"
        assert said


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(field=FIELDS, value=VALUES)
def test_any_entry_of_config_json(model: Path, tmp_path: Path, field: str, value: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    about = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {field: value}))
    only_readable_errors(folder, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 0), ("num_key_value_heads", 0), ("text_config", float("inf")), ("text_config", [1])],
)
def test_entries_that_ended_in_raw_errors(model: Path, tmp_path: Path, field: str, value: Any) -> None:
    """An IndexError, a ZeroDivisionError, an AttributeError."""
    test: Any = test_any_entry_of_config_json.hypothesis.inner_test  # pyright: ignore # hypothesis adds it
    test(model, tmp_path, field, value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{", "3", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_any_content_of_a_file(model: Path, tmp_path: Path, name: str, content: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / name).write_text(content)
    if name.startswith("model."):
        (folder / "model.safetensors").unlink()
    only_readable_errors(folder, tmp_path)
