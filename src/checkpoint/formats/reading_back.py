"""Reads back what was written in another format, and compares it with what it was written from."""

from collections.abc import Mapping
from pathlib import Path

from cairn.checkpoint.formats.content import Content, Format, Source, Stage, WriteOptions
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step import MODEL


def read_back(reader: Format, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
    """Compare what `reader` finds in `folder` with `content`, bit for bit, in the data type asked for.

    Returns:
        What was found, as `Exporter.verify`.

    Raises:
        Damaged: it is something else.
    """
    from cairn.checkpoint.formats.conversion import written_dtypes
    from cairn.checkpoint.streaming import check_equal  # imports torch

    back = reader.read(folder, content.model)
    dtypes = written_dtypes(content, options.dtype)
    for stem, named in back.tensors.items():
        found = _as_in_step(named, stem, content, folder)
        progress = stage(f"comparing {stem}", sum(source.spec.nbytes for source in found.values()))
        check_equal(found, content.tensors[stem], folder, dtypes=dtypes, on_bytes=progress)
    if back.step not in (None, content.step):
        raise Damaged(f"{folder}: says step {back.step}, but the checkpoint is of step {content.step}")
    return "read back and equal"


def _as_in_step(
    named: Mapping[str, Source], stem: str, content: Content, folder: Path
) -> Mapping[str, Source]:
    """What was read back, by the names that a step uses.

    Raises:
        CheckpointError: something is missing, or does not fit the model.
    """
    if named.keys() >= content.tensors[stem].keys() or content.model is None:
        return named
    from transformers import AutoConfig

    from cairn.checkpoint.formats.fitting import state_of, weights_of
    from cairn.checkpoint.formats.hub import hub_layout

    layout = hub_layout(AutoConfig.from_pretrained(content.model))  # pyright: ignore # typed in part
    return (weights_of if stem == MODEL else state_of)(named, layout, folder)
