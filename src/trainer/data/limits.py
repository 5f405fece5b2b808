"""How many tokens a model knows, and how many positions it has learned, by its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cairn.run.files import read_json

LEARNED_POSITIONS: Mapping[str, int] = {
    "biogpt": 1024,
    "codegen": 2048,
    "ctrl": 256,
    "gpt2": 1024,
    "gpt_bigcode": 1024,
    "gpt_neo": 2048,
    "gptj": 2048,
    "openai-gpt": 512,
    "opt": 2048,
    "xglm": 2048,
}
"""Model types that look positions up in a table, which ends, and the table's length unless they say it."""
NAMES = ("n_positions", "max_position_embeddings")


@dataclass(frozen=True)
class Limits:
    """rows: of the embeddings, padding included. positions: that are learned. None: unknown, or no limit."""

    rows: int | None
    positions: int | None


def limits_of(folder: Path) -> Limits:
    """The limits of the model in a Hugging Face directory.

    Raises:
        DamagedFile: its config.json is damaged.
    """
    about = read_json(folder / "config.json", dict[str, Any]) or {}
    text = about.get("text_config")
    inner = cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else about
    rows = _number(inner.get("vocab_size")) or _number(about.get("vocab_size"))
    kind = str(inner.get("model_type"))
    if kind not in LEARNED_POSITIONS:
        return Limits(rows, None)
    said = next((number for name in NAMES if (number := _number(inner.get(name)))), None)
    return Limits(rows, said or LEARNED_POSITIONS[kind])


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
