"""Checksums of tensors, with which a server proves that it holds what the trainer published.

A tensor's checksum is the sum of the 64-bit words of its bytes, modulo 2^64. So the checksums of its parts,
on whichever ranks, add up to it, and a device computes it at memory speed without a copy. A permutation of
whole words within a tensor goes unnoticed here, but the probe notices it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from cairn.checkpoint.tensors.placement import Share
from cairn.run.files import read_json, write_json

FILE = "checksums.json"
WORD = 8
"""Bytes of a word."""


def checksum(values: torch.Tensor, first_byte: int = 0) -> int:
    """The contribution of `values` to the checksum of their tensor, in which they begin at `first_byte`."""
    return wrapped([int(contribution(values, first_byte))])


class RunningSums:
    """The contributions of this process to the checksums of tensors, added up as their values pass by."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, first_byte: int) -> None:
        """Count flat `values` of a tensor, in which they begin at `first_byte`; nothing leaves the device."""
        found = contribution(values, first_byte)
        self._sums[name] = self._sums[name] + found if name in self._sums else found

    def numbers(self) -> dict[str, int]:
        """The sums; waits for the device once."""
        return as_numbers(self._sums)


def share_contribution(share: Share, flat: torch.Tensor) -> torch.Tensor:
    """What a share contributes to its tensor's checksum, left on the device.

    Args:
        flat: the share's values, perhaps as another data type.
    """
    size = flat.element_size()
    return torch.stack([contribution(values, first * size) for first, values in share.cut(flat)]).sum()


def as_numbers(contributions: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The contributions as Python integers; waits for the device once."""
    if not contributions:
        return {}
    values = torch.stack(list(contributions.values())).tolist()
    return {name: wrapped([value]) for name, value in zip(contributions, values, strict=True)}


def wrapped(contributions: Iterable[int]) -> int:
    """The checksum that these contributions add up to."""
    return sum(contributions) % (1 << 8 * WORD)


def merged(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The checksums of tensors, from the contributions of each of `ranks`."""
    whole: dict[str, int] = {}
    for sums in ranks:
        for name, value in sums.items():
            whole[name] = wrapped([whole.get(name, 0), value])
    return whole


def write_checksums(folder: Path, sums: Mapping[str, int]) -> None:
    """Write the checksums of a policy's tensors into its folder."""
    write_json(folder / FILE, dict(sums))


def remove_checksums(folder: Path) -> None:
    """Remove the checksums, before `folder` gets other tensors."""
    (folder / FILE).unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, int] | None:
    """The checksums of the tensors in `folder`; None if there are none.

    Raises:
        DamagedFile: the file does not hold checksums.
    """
    return read_json(folder / FILE, dict[str, int])


def contribution(values: torch.Tensor, first_byte: int = 0) -> torch.Tensor:
    """Like `checksum`, but left on the device, as an int64 whose bits count, not its sign."""
    data = values.detach().reshape(-1).view(torch.uint8)
    head = min(-first_byte % WORD, len(data))
    body, rest = words(data[head:])
    total = body.sum()
    for odd, position in ((data[:head], first_byte % WORD), (rest, 0)):
        if len(odd):
            shifts = 8 * torch.arange(position, position + len(odd), device=data.device)
            total = total + (odd.to(torch.int64) << shifts).sum()
    return total


def words(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole words of flat `values` as int64, and the remaining bytes."""
    data = values.detach().view(torch.uint8)
    end = len(data) // WORD * WORD
    body = data[:end]
    return (body.clone() if body.storage_offset() % WORD else body).view(torch.int64), data[end:]
