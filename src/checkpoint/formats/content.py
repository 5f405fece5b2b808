"""What a format must offer, and what it finds in a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cairn.checkpoint.layout import StoredTensor


@dataclass(frozen=True)
class Content:
    """The content of a folder. tensors: locations by stem, such as `checkpoint.step.MODEL`, and name."""

    tensors: Mapping[str, Mapping[str, StoredTensor]]


class Format(Protocol):
    """A way to store a model in a folder."""

    def detect(self, folder: Path) -> bool:
        """Whether `folder` has this format, judged by its file names."""
        ...

    def read(self, folder: Path) -> Content:
        """The folder's content; tensor values are not read.

        Raises:
            FileNotFoundError: a file that the format needs is missing.
            Damaged: a file is invalid.
        """
        ...
