"""Hugging Face directories: config.json, a tokenizer, and safetensors files under the hub's names (`hub`)."""

from pathlib import Path

from cairn.checkpoint.formats.content import Content
from cairn.checkpoint.layout import find_tensors
from cairn.checkpoint.step import MODEL


class HuggingFace:
    """Weights only; the `model/` of a step is such a directory, too."""

    def detect(self, folder: Path) -> bool:
        """Whether `folder` has a model's configuration."""
        return (folder / "config.json").exists()

    def read(self, folder: Path) -> Content:
        """The weights, under the names that they have in the folder.

        Raises:
            FileNotFoundError: there are no weights.
            Damaged: an index or a header can't be right.
        """
        return Content(tensors={MODEL: find_tensors(folder, "model")})
