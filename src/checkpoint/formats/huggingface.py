"""Hugging Face directories: config.json, a tokenizer, and safetensors files with the hub's names (`hub`)."""

from pathlib import Path

from cairn.checkpoint.formats.content import Content
from cairn.checkpoint.layout import find_tensors
from cairn.checkpoint.step import MODEL


class HuggingFace:
    """A folder of weights only; the `model/` of a step is one, too."""

    def detect(self, source: Path) -> bool:
        """Whether `source` is a folder with a config.json."""
        return (source / "config.json").exists()

    def read(self, source: Path) -> Content:
        """The weights, by their names in the folder.

        Raises:
            FileNotFoundError: the folder has no weights.
            Damaged: an index or a header is invalid.
        """
        return Content(tensors={MODEL: find_tensors(source, "model")}, model=source)
