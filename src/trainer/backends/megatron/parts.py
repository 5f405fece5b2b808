"""Where the weights and moments of megatron-core's model lie in the tensors of transformers' model.

A rank's optimiser has a range of each flattened parameter, which is itself this rank's part of a matrix, and
may be several of transformers' matrices, one after the other or interleaved (`formats.megatron`). What the
rank holds of a tensor of transformers' model are therefore pieces of several such ranges.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from cairn.checkpoint.tensors.placement import HeldPiece, Range, Scattered
from cairn.formats.megatron.megatron_names import parse, rows_of
from cairn.model.architectures import ModelTensor, Role, architecture_of, sizes_of
from cairn.model.hub_layout import Layout
from cairn.trainer.backends.megatron.families import FAMILIES
from cairn.trainer.group import Axis


class Stretch(NamedTuple):
    """`length` consecutive values: from `begin` in a flat parameter, from `first` in the tensor `name`."""

    name: str
    first: int
    begin: int
    length: int


class Shard(NamedTuple):
    """What this rank's optimiser has of a parameter: `values`, flat, from value `begin`."""

    name: str
    parameter: torch.nn.Parameter
    begin: int
    values: torch.Tensor


def stretches_of(
    name: str, parameter: torch.nn.Parameter, about: PreTrainedConfig, layout: Layout, axis: Axis
) -> Iterator[Stretch]:
    """Where the values of a rank's parameter lie in transformers' tensors, in the order of the parameter.

    Args:
        name: megatron-core's.
        layout: of transformers' model, in which all experts of a layer are one tensor.
        axis: the ranks that share matrices.

    Raises:
        NotImplementedError: transformers' model lacks the parameter.
    """
    if place := layout.places.get(name):  # the head of a reward model
        yield Stretch(place.name, place.first, 0, parameter.numel())
        return
    key = parse(name)
    if key is None:
        raise NotImplementedError(f"megatron-core's {name}")
    # The head of tied embeddings has a copy of its own on the last of several stages.
    tied: dict[Role, Role] = {"head": "embedding"} if about.tie_word_embeddings else {}
    names, whole = architecture_of(about, FAMILIES), sizes_of(about)
    cut = axis if getattr(parameter, "tensor_model_parallel", False) and axis.size > 1 else Axis()
    sizes = replace(whole, heads=whole.heads // cut.size, kv_heads=whole.kv_heads // cut.size)
    rows, width = parameter.shape[0], math.prod(parameter.shape[1:])
    by_columns = cut.size > 1 and getattr(parameter, "partition_dim", 0) == 1
    counts: dict[str, int] = defaultdict(int)
    for part in rows_of(key.roles, rows, sizes):
        counts[part.role] += part.count
    seen: dict[str, int] = defaultdict(int)
    for part in rows_of(key.roles, rows, sizes):
        target = names.name(ModelTensor(tied.get(part.role, part.role), key.kind, key.layer, key.expert))
        place = layout.places.get(target or "")
        if place is None:
            raise NotImplementedError(f"transformers' model lacks {target} ({name})")
        if by_columns:
            for row in range(part.first, part.first + part.count):
                first = place.first + (row * cut.size + cut.rank) * width
                yield Stretch(place.name, first, row * width, width)
        else:
            first = place.first + (cut.rank * counts[part.role] + seen[part.role]) * width
            yield Stretch(place.name, first, part.first * width, part.count * width)
        seen[part.role] += part.count


def scattered(
    shards: Iterable[Shard],
    about: PreTrainedConfig,
    layout: Layout,
    axis: Axis,
    like: torch.Tensor,
) -> dict[str, Scattered]:
    """transformers' tensors, of which this rank holds the values of its shards.

    Args:
        shards: none of parameters that other ranks have.
        layout: of transformers' model; the result is in the order of its tensors in memory.
        like: has the data type and the device of the values.

    Raises:
        NotImplementedError: transformers' model lacks a parameter.
    """
    found: dict[str, list[_Piece]] = {name: [] for name in layout.shapes}
    copies: dict[str, tuple[int, int] | None] = {}
    for shard in shards:
        values, end = shard.values, shard.begin + len(shard.values)
        storage, offset = int(values.untyped_storage().data_ptr()), int(values.storage_offset()) - shard.begin
        is_cut = getattr(shard.parameter, "tensor_model_parallel", False)
        for stretch in stretches_of(shard.name, shard.parameter, about, layout, axis):
            begin, stop = max(stretch.begin, shard.begin), min(stretch.begin + stretch.length, end)
            copies[stretch.name] = (0, 1) if is_cut else (axis.rank, axis.size)
            if getattr(shard.parameter, "shared", False):  # megatron-core's mark of the head's copy
                copies[stretch.name] = None
            if begin < stop:
                first = stretch.first + begin - stretch.begin
                found[stretch.name].append(_Piece(first, stop - begin, storage, offset + begin, values))
    return {
        name: Scattered(shape, like, _joined(sorted(found[name], key=_first)), copies.get(name, (0, 1)))
        for name, shape in layout.shapes.items()
    }


class _Piece(NamedTuple):
    """Values of one of transformers' tensors, from value `first`: in a storage, from value `offset`; `of` is
    a tensor there. Without a view of its own: a matrix that is cut by columns has as many pieces as rows."""

    first: int
    length: int
    storage: int
    offset: int
    of: torch.Tensor


def _first(piece: _Piece) -> int:
    return piece.first


def _joined(pieces: list[_Piece]) -> list[HeldPiece]:
    """Pieces that follow each other in memory, as the columns of a matrix do, become one."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        before = runs[-1][-1] if runs else None
        follows = before and before.storage == piece.storage and before.offset + before.length == piece.offset
        if follows:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_held(run) for run in runs]


def _held(run: list[_Piece]) -> HeldPiece:
    """Pieces that follow each other in memory."""
    ranges: list[Range] = []
    for piece in run:
        if ranges and sum(ranges[-1]) == piece.first:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + piece.length
        else:
            ranges.append((piece.first, piece.length))
    count = sum(piece.length for piece in run)
    return HeldPiece(tuple(ranges), run[0].of.as_strided((count,), (1,), run[0].offset))
