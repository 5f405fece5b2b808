"""Checksums of tensors: by these a server shows that it holds what the trainer published.

A tensor's checksum is the sum of the 64-bit words of its bytes, modulo 2^64. So it is the sum of those of its
parts, whichever rank has them, and a device computes it at the speed of its memory, without a copy. Values
that have moved by whole words within a tensor go unnoticed; those the probe notices.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from cairn.checkpoint.shares import Share, Stored, share_of
from cairn.run.files import read_json, write_json

FILE = "checksums.json"
WORD = 8
"""Bytes."""


def checksum(values: torch.Tensor, first_byte: int = 0) -> int:
    """What `values` contribute to the checksum of the tensor in which they begin at `first_byte`."""
    return wrapped([int(contribution(values, first_byte))])


def checksums(tensors: Mapping[str, Stored], rank: int) -> dict[str, int]:
    """What this rank's values contribute to the checksums of `tensors`, by name."""
    sums: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        share = share_of(name, tensor, rank)
        if share.owned and share.ranges:
            sums[name] = share_contribution(share, share.local.reshape(-1))
    return as_numbers(sums)


def share_contribution(share: Share, flat: torch.Tensor) -> torch.Tensor:
    """What a share contributes to its tensor's checksum, left on the device.

    Args:
        flat: the share's values, perhaps as another data type.
    """
    size = flat.element_size()
    return torch.stack([contribution(values, first * size) for first, values in share.cut(flat)]).sum()


def as_numbers(contributions: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The numbers that stand for `contributions`; waits for the device once."""
    if not contributions:
        return {}
    values = torch.stack(list(contributions.values())).tolist()
    return {name: wrapped([value]) for name, value in zip(contributions, values, strict=True)}


def wrapped(contributions: Iterable[int]) -> int:
    """The checksum of what these contribute."""
    return sum(contributions) % (1 << 8 * WORD)


def merged(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The checksums of tensors of which each of `ranks` has contributed a part."""
    whole: dict[str, int] = {}
    for sums in ranks:
        for name, value in sums.items():
            whole[name] = wrapped([whole.get(name, 0), value])
    return whole


def write_checksums(folder: Path, sums: Mapping[str, int]) -> None:
    """Put the checksums of a policy's tensors beside them."""
    write_json(folder / FILE, dict(sums))


def remove_checksums(folder: Path) -> None:
    """`folder` gets other tensors."""
    (folder / FILE).unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, int] | None:
    """The checksums that `folder` has of its tensors; None if it has none.

    Raises:
        DamagedFile: the file does not hold checksums.
    """
    return read_json(folder / FILE, dict[str, int])


def contribution(values: torch.Tensor, first_byte: int = 0) -> torch.Tensor:
    """As `checksum`, but left on the device: an int64 whose bits are meant, not its sign."""
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
    """The words of flat `values` as int64, and the bytes after the last whole one."""
    data = values.detach().view(torch.uint8)
    end = len(data) // WORD * WORD
    body = data[:end]
    return (body.clone() if body.storage_offset() % WORD else body).view(torch.int64), data[end:]
