"""Reads back what was written in another format, and compares it with what it was written from."""

from pathlib import Path

from cairn.checkpoint.formats.content import Content, Format, Stage, WriteOptions
from cairn.checkpoint.manifest import Damaged


def read_back(reader: Format, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
    """Compare what `reader` finds in `folder` with `content`, bit for bit, in the data type asked for.

    Returns:
        What was found, as `Exporter.verify`.

    Raises:
        Damaged: it is something else.
    """
    from cairn.checkpoint.formats.huggingface import written_dtypes
    from cairn.checkpoint.streaming import check_equal  # imports torch

    back = reader.read(folder)
    dtypes = written_dtypes(content, options.dtype)
    for stem, named in back.tensors.items():
        progress = stage(f"comparing {stem}", sum(source.spec.nbytes for source in named.values()))
        check_equal(named, content.tensors[stem], folder, dtypes=dtypes, on_bytes=progress)
    if back.step not in (None, content.step):
        raise Damaged(f"{folder}: says step {back.step}, but the checkpoint is of step {content.step}")
    return "read back and equal"
