"""The formats of model folders that Cairn reads, by name. A new one is a module and an entry here."""

from pathlib import Path

from cairn.checkpoint.formats.content import Content, Format
from cairn.checkpoint.formats.huggingface import HuggingFace

__all__ = ["FORMATS", "Content", "Format", "format_of"]

FORMATS: dict[str, Format] = {"hf": HuggingFace()}


def format_of(folder: Path) -> Format | None:
    """The format of a folder; None if it has none of these formats."""
    return next((known for known in FORMATS.values() if known.detect(folder)), None)
