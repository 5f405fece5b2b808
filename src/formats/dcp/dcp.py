"""PyTorch distributed checkpoints (DCP) of FSDP2 programs: weights, AdamW's state, and the step."""

import json
import re
from pathlib import Path
from typing import Any

from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.dcp.dcp_programs import FILE_NAME

PLACES = (("",), ("trainer",), ("policy/weights", "policy/optimizer"))
"""Where the folders with `.metadata` lie in what a program saves: in itself, prime-rl's and NeMo-RL's."""
STEP = re.compile(r"step[-_](\d+)")
"""Folders of steps; torchtitan's have a hyphen."""


class Dcp:
    """The folder of a checkpoint, which holds `.metadata` and `.distcp` files, or a folder of steps."""

    stems = (MODEL, OPTIMIZER)

    layout = "dcp"
    """What is written; a name in `dcp_writer.LAYOUTS`."""

    def detect(self, source: Path) -> bool:
        """Whether `source` has such files, but not those of Megatron, which uses DCP inside."""
        return bool(folders_in(source)) and not (step_in(source) / "common.pt").exists()

    def read(self, source: Path, model: Path | None = None) -> Content:
        from cairn.formats.dcp.dcp_reading import read  # imports torch

        folders = folders_in(source)
        if not folders:
            raise FileNotFoundError(2, f"holds no {FILE_NAME}", str(source))
        return read(step_in(source), folders, model)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.common.verified_reads import KeptValues  # imports torch
        from cairn.formats.dcp.dcp_writer import write  # imports torch

        kept = KeptValues(content, options.dtype)
        write(kept.content, self.place(folder, content.step or 0), self.layout, options)
        return kept.read_back(self, folder)

    def place(self, folder: Path, step: int) -> Path:
        """Where the files go in the exported folder."""
        return folder


class PrimeRl(Dcp):
    """What prime-rl's trainer saves: `step_N/trainer`, in a folder of checkpoints."""

    layout = "prime-rl"

    def detect(self, source: Path) -> bool:
        return (step_in(source) / "trainer" / FILE_NAME).is_file()

    def place(self, folder: Path, step: int) -> Path:
        return folder / f"step_{step}" / "trainer"

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        verify = super().write(content, folder, options)
        return lambda stage: verify(stage) + _decay(content, "prime-rl")


class Torchtitan(Dcp):
    """What torchtitan saves: `step-N`, in a folder of checkpoints."""

    layout = "torchtitan"

    def detect(self, source: Path) -> bool:
        step = step_in(source)
        return step.absolute().name.startswith("step-") and (step / FILE_NAME).is_file()

    def place(self, folder: Path, step: int) -> Path:
        return folder / f"step-{step}"

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        verify = super().write(content, folder, options)
        return lambda stage: verify(stage) + _decay(content, "torchtitan") + _experts(content)


def _decay(content: Content, program: str) -> str:
    """What to know of weight decay, to be said after what was verified."""
    decay = content.settings.get("optimizer.weight_decay")
    return f"; {program} decays all weights by {decay}, Cairn matrices only" if decay else ""


def _experts(content: Content) -> str:
    """What torchtitan needs to train the experts as Cairn does, to be said after what was verified."""
    config: dict[str, Any] = {}
    if content.model is not None:
        config = json.loads((content.model / "config.json").read_text())
    if config.get("model_type") != "qwen3_moe":
        return ""
    norm = "" if config.get("norm_topk_prob") else " and route_norm = False in its router"
    return (
        f"; torchtitan goes on as Cairn would with load_balance_coeff = None in its MoE{norm}: the biases of "
        "experts, which it would change from then on, are zero"
    )


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
