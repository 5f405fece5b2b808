"""The tokens that end an answer: those that the tokenizer, generation_config.json and config.json name.

A model's folder says it in three places, which often disagree: the tokenizer may name the end of a text, and
generation_config.json the end of a turn, or the other way round.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cairn.run.errors import UsageError
from cairn.run.files import read_json

GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "the tokenizer"
"""Stands for the tokenizer among the places that name a token."""


def end_tokens(folder: Path, eos_token_id: int | None) -> dict[int, tuple[str, ...]]:
    """The ids of the tokens that end an answer, ascending, each with the places that name it.

    Args:
        folder: Hugging Face directory, in which generation_config.json and config.json are read.
        eos_token_id: that of the directory's tokenizer; None if it has none.

    Returns:
        The places are TOKENIZER and names of files, such as `{7: ("the tokenizer", "config.json")}`.

    Raises:
        DamagedFile: one of the files is damaged.
        UsageError: one of them has an `eos_token_id` that is no token id.
    """
    named: dict[int, list[str]] = {}
    if eos_token_id is not None:
        named[eos_token_id] = [TOKENIZER]
    for name in (GENERATION_CONFIG, "config.json"):
        for token_id in _named_in(folder / name):
            named.setdefault(token_id, []).append(name)
    return {token_id: tuple(dict.fromkeys(named[token_id])) for token_id in sorted(named)}


def _named_in(path: Path) -> list[int]:
    about = read_json(path, dict[str, Any]) or {}
    text = about.get("text_config")
    parts = [about, cast("Mapping[str, Any]", text)] if isinstance(text, Mapping) else [about]
    found: list[int] = []
    for part in parts:
        ids = part.get("eos_token_id")
        for token_id in cast("list[Any]", ids) if isinstance(ids, list) else [ids]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise UsageError(
                    f"{path}: has eos_token_id = {ids!r}; it must be a token id, or a list of them"
                )
            if token_id >= 0:  # some files say -1 for none
                found.append(token_id)
    return found
