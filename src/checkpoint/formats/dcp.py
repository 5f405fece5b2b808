"""PyTorch distributed checkpoints (DCP) of FSDP2 programs: weights, AdamW's state, and the step."""

import re
from pathlib import Path

from cairn.checkpoint.formats.content import Content, Stage, WriteOptions
from cairn.checkpoint.formats.dcp_programs import FILE_NAME
from cairn.checkpoint.formats.reading_back import read_back

PLACES = (("",), ("trainer",), ("policy/weights", "policy/optimizer"))
"""Where the folders with `.metadata` lie in what a program saves: in itself, prime-rl's and NeMo-RL's."""
STEP = re.compile(r"step[-_](\d+)")
"""Folders of steps; torchtitan's have a hyphen."""


class Dcp:
    """The folder of a checkpoint, which holds `.metadata` and `.distcp` files, or a folder of steps."""

    layout = "dcp"
    """What is written; a name in `dcp_layouts.LAYOUTS`."""

    def detect(self, source: Path) -> bool:
        """Whether `source` has such files, but not those of Megatron, which uses DCP inside."""
        return bool(folders_in(source)) and not (step_in(source) / "common.pt").exists()

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
        return read(step_in(source), folders, model)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> None:
        """Write what `dcp_layouts` has for this format.

        Raises:
            CheckpointError: there is no config.json, or something has no counterpart in the program.
            OSError: a file can't be written.
        """
        from cairn.checkpoint.formats.dcp_writer import write  # imports torch

        write(content, self.place(folder, content.step or 0), self.layout, options)

    def verify(self, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
        """See `Exporter.verify`."""
        return read_back(self, content, folder, options, stage)

    def place(self, folder: Path, step: int) -> Path:
        """Where the files go in the exported folder."""
        return folder


class PrimeRl(Dcp):
    """What prime-rl's trainer saves: `step_N/trainer`, in a folder of checkpoints."""

    layout = "prime-rl"

    def detect(self, source: Path) -> bool:
        """Whether `source` is such a folder, or one of its steps."""
        return (step_in(source) / "trainer" / FILE_NAME).is_file()

    def place(self, folder: Path, step: int) -> Path:
        """See `Dcp.place`."""
        return folder / f"step_{step}" / "trainer"

    def verify(self, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
        """See `Exporter.verify`; what the program will do otherwise is said, too."""
        return super().verify(content, folder, options, stage) + _decay(content, "prime-rl")


class Torchtitan(Dcp):
    """What torchtitan saves: `step-N`, in a folder of checkpoints."""

    layout = "torchtitan"

    def detect(self, source: Path) -> bool:
        """Whether `source` is such a folder, or one of its steps."""
        step = step_in(source)
        return step.absolute().name.startswith("step-") and (step / FILE_NAME).is_file()

    def place(self, folder: Path, step: int) -> Path:
        """See `Dcp.place`."""
        return folder / f"step-{step}"

    def verify(self, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
        """See `Exporter.verify`; what the program will do otherwise is said, too."""
        return super().verify(content, folder, options, stage) + _decay(content, "torchtitan")


def _decay(content: Content, program: str) -> str:
    """What to know of weight decay, to be said after what was verified."""
    decay = content.settings.get("optimizer.weight_decay")
    return f"; {program} decays all weights by {decay}, Cairn matrices only" if decay else ""


def step_in(source: Path) -> Path:
    """The folder of the newest step in `source`; `source` itself if it holds no steps."""
    if not source.is_dir() or _folders_of_step(source):
        return source
    steps = {int(found[1]): path for path in source.iterdir() if (found := STEP.fullmatch(path.name))}
    whole = [number for number, path in steps.items() if _folders_of_step(path)]
    return steps[max(whole)] if whole else source


def folders_in(source: Path) -> list[Path]:
    """The folders in `source` that hold `.metadata`; empty if it is no such checkpoint."""
    return _folders_of_step(step_in(source))


def _folders_of_step(step: Path) -> list[Path]:
    for places in PLACES:
        if (step / places[0] / FILE_NAME).is_file():
            return [step / place for place in places if (step / place / FILE_NAME).is_file()]
    return []
