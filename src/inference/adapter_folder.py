"""Where a server keeps its copies of adapters: known to the server, and to what starts and kills it."""

import tempfile
from pathlib import Path

NAME = "cairn-adapters-"
"""What the names of such folders begin with."""


def adapter_folder(epoch: str, root: Path | None = None) -> Path:
    """The folder of one start of a server. root: default: where temporary files go."""
    return (root or Path(tempfile.gettempdir())) / f"{NAME}{epoch}"
