"""Checkpoints of DeepSpeed's engine: the partitions of ZeRO 1, 2 and 3, and universal checkpoints."""

from pathlib import Path

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.formats.base import Content, Verification, WriteOptions, folder_of_model
from cairn.formats.deepspeed.deepspeed_files import LATEST, STATES, UNIVERSAL


class DeepSpeed:
    """A folder such as `global_step20`, or one that holds it, such as Trainer's `checkpoint-20`.

    What is written is a universal checkpoint, which engines with any stage and number of ranks load.
    """

    stems = (MODEL, OPTIMIZER)

    def detect(self, source: Path) -> bool:
        try:
            return folder_in(source) is not None
        except Damaged:
            return True

    def read(self, source: Path, model: Path | None = None) -> Content:
        from cairn.formats.deepspeed.deepspeed_state import read_universal  # imports torch
        from cairn.formats.deepspeed.deepspeed_zero import read_zero

        folder = folder_in(source)
        if folder is None:
            raise FileNotFoundError(2, "holds no checkpoint of DeepSpeed", str(source))
        read = read_universal if (folder / UNIVERSAL).is_dir() else read_zero
        return read(folder, folder_of_model(model, folder, folder.parent))

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.common.verified_reads import KeptValues  # imports torch
        from cairn.formats.deepspeed.deepspeed_writer import write  # imports torch

        kept = KeptValues(content, options.dtype)
        write(kept.content, folder, options)
        return kept.read_back(self, folder)


def folder_in(source: Path) -> Path | None:
    """The folder with the engine's files: `source`, or one in it that `latest` names; None if there is none.

    Raises:
        Damaged: `latest` does not hold the name of a folder beside it.
    """
    if _has_states(source):
        return source
    for name in LATEST:
        if not (source / name).is_file():
            continue
        with open(source / name, "rb") as file:
            tag = file.read(256).decode(errors="replace").strip()
        inside = next((path for path in source.iterdir() if path.name == tag.rpartition("/")[2]), None)
        if inside is None or not _has_states(inside):
            continue
        if inside.name != tag:
            raise Damaged(f"{source / name}: names {tag!r}, which is no folder beside it")
        return inside
    return None


def _has_states(folder: Path) -> bool:
    return folder.is_dir() and any(STATES.fullmatch(path.name) for path in folder.iterdir())
