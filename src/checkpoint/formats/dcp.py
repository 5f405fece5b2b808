"""PyTorch distributed checkpoints (DCP) of FSDP2 programs: weights, AdamW's state, and the step."""

from pathlib import Path

from cairn.checkpoint.formats.content import Content, Stage, WriteOptions
from cairn.checkpoint.formats.dcp_programs import FILE_NAME
from cairn.checkpoint.formats.reading_back import read_back

PLACES = (("",), ("trainer",), ("policy/weights", "policy/optimizer"))
"""Where the folders with `.metadata` lie in what a program saves: in itself, prime-rl's and NeMo-RL's."""


class Dcp:
    """The folder of a checkpoint, which holds `.metadata` and `.distcp` files."""

    def detect(self, source: Path) -> bool:
        """Whether `source` has such files, but not those of Megatron, which uses DCP inside."""
        return bool(folders_in(source)) and not (source / "common.pt").exists()

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The content; see `content.Format`.

        Raises:
            FileNotFoundError: the folder has no `.metadata`.
            Refused: a pickle names what is not allowed.
            Damaged: a file is invalid.
            CheckpointError: keys belong to no known program; the message lists them.
        """
        from cairn.checkpoint.formats.dcp_reading import read  # imports torch

        folders = folders_in(source)
        if not folders:
            raise FileNotFoundError(2, f"holds no {FILE_NAME}", str(source))
        return read(source, folders, model)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> None:
        """Write `{"model": ..., "optim": {"state": ..., "param_groups": ...}, "step": ...}`.

        So do programs that save what torch's `get_state_dict` returns: weights have the names of
        transformers' modules, and tied ones are stored under each of their names.

        Raises:
            CheckpointError: there is no config.json.
            OSError: a file can't be written.
        """
        from cairn.checkpoint.formats.dcp_writer import write  # imports torch

        write(content, folder, options)

    def verify(self, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
        """See `Exporter.verify`."""
        return read_back(self, content, folder, options, stage)


def folders_in(source: Path) -> list[Path]:
    """The folders in `source` that hold `.metadata`; empty if it is no such checkpoint."""
    for places in PLACES:
        if (source / places[0] / FILE_NAME).is_file():
            return [source / place for place in places if (source / place / FILE_NAME).is_file()]
    return []
