"""Checkpoints of Megatron-LM and programs with megatron-core's `dist_checkpointing`, format `torch_dist`."""

import json
import re
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import MALFORMED
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.dcp.dcp_programs import FILE_NAME
from cairn.formats.megatron.megatron_names import ABOUT, FORMAT, LATEST, RELEASE


class Megatron:
    """A folder of `dist_checkpointing.save`, or one with such folders for iterations.

    AdamW's state is read where it is stored by weight. Weights are written under the names and in the layout
    that are the same for any parallelism.
    """

    stems = (MODEL,)

    def detect(self, source: Path) -> bool:
        """Whether `source` has megatron-core's `metadata.json`, or names an iteration whose folder has it."""
        folder = folder_in(source)
        return folder is not None and (folder / ABOUT).is_file() and (folder / FILE_NAME).is_file()

    def read(self, source: Path, model: Path | None = None) -> Content:
        from cairn.formats.megatron.megatron_reading import read  # imports torch

        folder = folder_in(source) or source
        _check_format(folder)
        return read(source, folder, model)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.common.verified_reads import KeptValues  # imports torch
        from cairn.formats.megatron.megatron_writer import write  # imports torch

        kept = KeptValues(content, options.dtype)
        write(kept.content, folder, options)
        return kept.read_back(self, folder)


def folder_in(source: Path) -> Path | None:
    """The folder of the checkpoint in `source`: itself, or the newest iteration's; None if there is none.

    Raises:
        Damaged: the file that names the newest iteration holds something else.
    """
    if (source / ABOUT).is_file():
        return source
    try:
        text = (source / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text == RELEASE:
        return source / text
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise Damaged(f"{source / LATEST}: holds {text[:40]!r}, which is no iteration")
    return source / f"iter_{int(text):07d}"


def _check_format(folder: Path) -> None:
    """Check that the folder has the format that Cairn reads."""
    path = folder / ABOUT
    if not path.is_file():
        raise FileNotFoundError(2, f"holds no {ABOUT}", str(folder))
    try:
        about: dict[str, Any] = json.loads(path.read_text())
        backend = about["sharded_backend"]
    except MALFORMED as error:
        raise Damaged(f"{path}: not what megatron-core writes: {error}") from None
    if backend != FORMAT:
        raise CheckpointError(
            f"{folder}: has Megatron's format {backend!r}; Cairn reads {FORMAT!r}: load the checkpoint with "
            f"Megatron and save it with --ckpt-format {FORMAT}"
        )
    if not (folder / FILE_NAME).is_file():
        raise FileNotFoundError(2, f"holds no {FILE_NAME}", str(folder))
