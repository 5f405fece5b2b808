"""Deltas in the folders of policy versions, and the chain of them back to a version that is there whole.

A folder with a delta holds `delta.json`, which names the folder that the delta is relative to, and one file
`delta-<rank>.safetensors` for each rank that has changed any of its values: the blocks of each tensor
(`delta.py`), as bytes. A version is made of a policy that somebody has, or of the whole one at the chain's
beginning, by applying each delta from there on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.reader import as_memory
from cairn.policy.checksums import read_checksums
from cairn.policy.delta import RankDelta, apply, digest_of
from cairn.run.files import DamagedFile, safetensors_bytes
from cairn.run.messages import read_delta_note

STEM = "delta-"


def delta_file(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"{STEM}{rank}.safetensors"


def write_rank(folder: Path, rank: int, delta: RankDelta) -> None:
    """Write one rank's part of a delta."""
    blocks = {
        name: torch.frombuffer(bytearray(each), dtype=torch.uint8) for name, each in delta.blocks.items()
    }
    save_file(blocks, delta_file(folder, rank))


@dataclass(frozen=True)
class DeltaChain:
    """What a version is made of.

    whole: the folder with the policy to begin with; None: it is the one that was asked with. links: folders
    whose deltas are applied to it, in this order.
    """

    whole: Path | None
    links: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the files to read."""
        folders = [*self.links, *([self.whole] if self.whole else [])]
        return sum(map(safetensors_bytes, folders))


def chain_to(folder: Path, has: str = "") -> DeltaChain | None:
    """How the policy of `folder` is made by somebody who has the policy with the digest `has`, if any.

    None if the folder holds no delta.

    Raises:
        Damaged: a link is missing, or is not what the next one is relative to.
    """
    links: list[Path] = []
    wanted = ""
    try:
        while (note := read_delta_note(folder)) is not None:
            if wanted not in ("", note.digest):
                raise Damaged(f"{folder}: not the policy that the delta in {links[0]} is relative to")
            if note.digest == has:
                return DeltaChain(None, tuple(links))
            links.insert(0, folder)
            if note.base_digest == has:
                return DeltaChain(None, tuple(links))
            wanted, base = note.base_digest, folder.with_name(note.base)
            if base in links:
                raise Damaged(f"{folder}: its delta is relative to itself")
            folder = base
        if not links:
            return None
        if digest_of(read_checksums(folder) or {}) != wanted:
            raise Damaged(f"{folder}: is not there, or not what the delta in {links[0]} is relative to")
    except (DamagedFile, OSError) as error:
        raise Damaged(str(error)) from None
    return DeltaChain(folder, tuple(links))


class DeltaFiles:
    """The delta of a folder, read."""

    def __init__(self, folder: Path):
        """Read it.

        Raises:
            Damaged: a file is missing or damaged.
        """
        self._ranks: list[Mapping[str, torch.Tensor]] = []
        file = folder
        try:
            note = read_delta_note(folder)
            for rank in range(note.ranks if note else 0):
                file = delta_file(folder, rank)
                self._ranks.append(load_file(file))
        except (DamagedFile, SafetensorError, OSError) as error:
            raise Damaged(f"{file}: {error}") from None

    def apply(self, name: str, tensor: torch.Tensor) -> None:
        """Make the new tensor of the old one, in place.

        Raises:
            Damaged: it is no delta of such a tensor, which may hold some new values.
        """
        for blocks in self._ranks:
            if name in blocks:
                apply(as_memory(blocks[name]), tensor.view(-1), name)
