"""The files beside a model's weights: configuration, tokenizer, chat templates, settings of generation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cairn.run.recipe import TEMPLATES, tokenizer_files

SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
"""Files of which a folder with a whole tokenizer has at least one."""
OF_TRAINING = frozenset({"trainer_state.json"})
"""Files beside a model that belong to its training."""


def companion_files(folder: Path) -> dict[str, Path]:
    """The files beside the weights in a Hugging Face directory, by their paths in it, such as `config.json`.

    Indexes of files of weights, hidden files and what belongs to training are left out.
    """
    found = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.is_file()]
    own = {
        path.name: path
        for path in found
        if not path.name.startswith(".")
        and path.name not in OF_TRAINING
        and ".safetensors" not in path.name
        and not path.name.endswith(".bin.index.json")
    }
    return own | {
        f"{TEMPLATES}/{path.name}": path
        for path in sorted((folder / TEMPLATES).glob("*.jinja"))
        if path.is_file()
    }


def with_tokenizer_of(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Files beside weights, with the tokenizer, chat templates and settings of generation of another folder.

    What that folder has goes before what `files` have; a chat template of its own replaces all of theirs, and
    a whole tokenizer of its own leaves none of theirs.
    """
    own = {path.relative_to(folder).as_posix(): path for path in tokenizer_files(folder)}
    generation = folder / "generation_config.json"
    if generation.is_file():
        own[generation.name] = generation
    kept = dict(files)
    if any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
        beside = next(iter(files.values())).parent if files else folder
        theirs = {path.relative_to(beside).as_posix() for path in tokenizer_files(beside)}
        kept = {name: path for name, path in kept.items() if name not in theirs or is_template(name)}
    if _has_template(own):
        kept = {name: path for name, path in kept.items() if not is_template(name)}
    return kept | own


def is_template(name: str) -> bool:
    """Whether a file beside weights holds a chat template."""
    return name.startswith(("chat_template.", f"{TEMPLATES}/"))


def _has_template(files: Mapping[str, Path]) -> bool:
    """Whether a tokenizer's files have a chat template."""
    if any(is_template(name) for name in files):
        return True
    config = files.get("tokenizer_config.json")
    if config is None:
        return False
    try:
        about: Any = json.loads(config.read_bytes())
    except (ValueError, RecursionError):  # whoever loads the tokenizer says so
        return False
    return isinstance(about, dict) and bool(cast("dict[str, Any]", about).get("chat_template"))
