"""What a folder in some format holds, in Cairn's terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cairn.checkpoint.layout import StoredTensor


@dataclass(frozen=True)
class Content:
    """What a folder holds. tensors: where they lie, by stem, such as `checkpoint.step.MODEL`, and name."""

    tensors: Mapping[str, Mapping[str, StoredTensor]]


class Format(Protocol):
    """One way to lay a model out in a folder."""

    def detect(self, folder: Path) -> bool:
        """Whether `folder` is of this format, by a look at its names."""
        ...

    def read(self, folder: Path) -> Content:
        """What is in it; values stay on disk.

        Raises:
            FileNotFoundError: a file that the format needs is missing.
            Damaged: a file can't be right.
        """
        ...
