"""Where the files of verl's and SkyRL's checkpoints lie."""

import re
from dataclasses import dataclass
from pathlib import Path

POLICIES = ("actor", "policy")
"""Folders of the trained model in a step's folder: verl's and SkyRL's."""
CRITIC = "critic"
"""The folder of the critic beside it, in both."""
LATEST = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
"""Files that name the newest step, beside the folders of steps."""
STEP = re.compile(r"global_step_(\d+)")
_RANK = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


@dataclass(frozen=True)
class Places:
    """Where a checkpoint is.

    policy: the folder of the trained model. step: the folder that it is in, if that holds a step. number:
    the number in its name. critic: the folder of the critic in it, if it has shards, and if the source holds
    both.
    """

    policy: Path
    step: Path | None
    number: int | None
    critic: Path | None = None


def places_in(source: Path) -> Places | None:
    """Where the checkpoint in `source` is; None if there is none."""
    step = source
    for name in LATEST:
        if (source / name).is_file():
            number = (source / name).read_text()[:40].strip()
            step = source / f"global_step_{number}" if number.isdecimal() else source
    for policy in (*(step / name for name in POLICIES), step):
        if _has_shards(policy):
            found = STEP.fullmatch((policy.parent if policy != step else policy.absolute().parent).name)
            holder = policy.parent if found or policy != step else None
            critic = step / CRITIC if policy != step and _has_shards(step / CRITIC) else None
            return Places(policy, holder, found and int(found[1]), critic)
    return None


def _has_shards(folder: Path) -> bool:
    return folder.is_dir() and any(_RANK.fullmatch(path.name) for path in folder.iterdir())


def ranks_in(folder: Path) -> dict[int, set[int]]:
    """The ranks whose weights a folder holds, by the number of ranks in the names of the files."""
    ranks: dict[int, set[int]] = {}
    for path in folder.iterdir():
        if match := _RANK.fullmatch(path.name):
            ranks.setdefault(int(match[1]), set()).add(int(match[2]))
    return ranks
