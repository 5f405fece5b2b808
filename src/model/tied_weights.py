"""Tied weights of which files hold copies: whether these are copies is compared, and not assumed."""

import math
from collections.abc import Mapping

import torch

from cairn.checkpoint.tensors.dtypes import DTYPES
from cairn.checkpoint.tensors.source import TensorSource
from cairn.model.hub_layout import Layout

VALUES = 1 << 22
"""Values of two tensors that are compared at a time."""


def tied_apart(found: Mapping[str, TensorSource], layout: Layout) -> tuple[list[str], dict[str, str]]:
    """The tensors that the model ties to others which are there, too.

    Returns:
        The names of those that are copies of these others, and of those that are not, with the others'.

    Raises:
        Damaged: a tensor can't be read.
    """
    owners = {place.name: name for name, place in layout.find(found.keys()).items() if name in found}
    owners |= {name: name for name in layout.places if name in found}
    copies: list[str] = []
    apart: dict[str, str] = {}
    for name, of in (layout.tied_in_memory | layout.tied).items():
        owner = owners.get(of)
        if name not in found or owner is None or name == owner:
            continue
        if same_values(found[name], found[owner]):
            copies.append(name)
        else:
            apart[name] = owner
    return copies, apart


def is_copy(name: str, parts: Mapping[str, TensorSource], layout: Layout) -> bool:
    """Whether a tensor, by transformers' name, is a copy of one in `parts` to which the model ties it."""
    of = layout.tied_in_memory.get(name)
    return name in parts and of is not None and of in parts and same_values(parts[name], parts[of])


def same_values(one: TensorSource, other: TensorSource) -> bool:
    """Whether two tensors have the same shape and values, whatever their data types.

    Raises:
        Damaged: one can't be read.
    """
    if one.spec.shape != other.spec.shape:
        return False
    count = math.prod(one.spec.shape)
    for first in range(0, count, VALUES):
        parts: list[torch.Tensor] = []
        for source in (one, other):
            part = torch.empty(min(VALUES, count - first), dtype=DTYPES[source.spec.dtype])
            source.fill(first, part)
            parts.append(part)
        a, b = parts
        if not torch.equal(a, b) if a.dtype == b.dtype else not torch.equal(a.double(), b.double()):
            return False
    return True
