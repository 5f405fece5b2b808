"""The formats of checkpoints that Cairn reads and writes. A new one is a module and an entry here."""

from pathlib import Path

from cairn.checkpoint.formats.content import Content, Exporter, Format, Source, WriteOptions
from cairn.checkpoint.formats.dcp import Dcp
from cairn.checkpoint.formats.hf_trainer import HuggingFaceTrainer
from cairn.checkpoint.formats.huggingface import HuggingFace
from cairn.checkpoint.formats.plain import PlainFile

__all__ = ["EXPORTERS", "FORMATS", "Content", "Exporter", "Format", "Source", "WriteOptions", "format_of"]

FORMATS: dict[str, Format] = {
    "dcp": Dcp(),
    "hf-trainer": HuggingFaceTrainer(),
    "pt": PlainFile(),
    "hf": HuggingFace(),
}
"""The formats that are read. Of two that a folder has, the first is meant: list the special before `hf`."""
EXPORTERS: dict[str, Exporter] = {"dcp": Dcp(), "hf": HuggingFace()}
"""The formats that are written. Each is in FORMATS, too, so that the result can be read back."""


def format_of(source: Path) -> str | None:
    """The name of a file's or folder's format; None if it has none of these formats."""
    return next((name for name, known in FORMATS.items() if known.detect(source)), None)
