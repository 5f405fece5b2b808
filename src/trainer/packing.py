"""Batches to micro-batches: packed rows, with no attention across samples."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cairn.config.trainer import TrainerBase
from cairn.run.batches import COLUMNS, TARGETS, Batch, Sample, columns_of

ALIGNMENT = 16
"""Bytes to whose multiples tensors begin in a transfer's buffer."""
ROW_TOKENS = 64
"""Length of rows whose samples are all shorter, unless seq_len is less."""
Arrange = Callable[[list[list[int]], int], list[list[list[int]]]]
"""Blocks of rows from the lengths of each unit's samples and the length of a row.

A block is a list of rows, and a row a list of samples, by their numbers. Numbers count through all units. All
samples of a unit are in one block, and a block's rows stay together.
"""
Group = list[list[int]]
"""The rows of a micro-batch; a row is a list of samples, by their numbers."""


@dataclass
class MicroBatch:
    """Rows that go through the model together. R rows of T tokens, several samples in a row.

    input_ids, position_ids: int64 [R, T]; positions start at 0 with each sample, which is how the model
    knows where one ends; padding is a sample of its own. loss_mask, is_token (not padding): bool [R, T].
    columns: those that the batch's samples have (`cairn.run.batches.COLUMNS`), by name, [R, T]; with several
    values for each token [R, T, ...], unless there is no sample.
    learned: int64 [L], where `loss_mask` is True in the flattened rows. bounds: int32 [samples + 1], where
    each sample begins in the flattened rows, and at last R * T. Both are made on the host, since a GPU could
    tell how long they are only after all that it was asked to do before.
    samples: how many there are, the padding of each row counted as one. longest: tokens of the longest.
    tokens: how many there are, without padding.
    index: its place among the step's micro-batches, on whichever rank it runs.
    units: int64 [units, samples of each], which of the samples above are a unit, in the unit's order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    is_token: torch.Tensor
    columns: dict[str, torch.Tensor]
    learned: torch.Tensor
    bounds: torch.Tensor
    samples: int
    longest: int
    tokens: int
    index: int
    units: torch.Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.int64))

    @property
    def scored_ids(self) -> torch.Tensor:
        """int64 or int32 [R, T], the tokens whose logprobs are computed: those of the column `targets`, or
        else the rows' own."""
        return self.columns.get(TARGETS, self.input_ids)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`, which one transfer brings there; a GPU's is not waited for."""
        if device.type == "cpu":
            return self
        here = [self.input_ids, self.position_ids, self.loss_mask, self.is_token]
        here += [self.learned, self.bounds, self.units]
        computed = {name: values for name, values in self.columns.items() if values.device == device}
        to_move = {name: values for name, values in self.columns.items() if name not in computed}
        there = transfer([*here, *to_move.values()], device)
        input_ids, position_ids, loss_mask, is_token, learned, bounds, units, *moved = there
        return replace(
            self,
            input_ids=input_ids,
            position_ids=position_ids,
            loss_mask=loss_mask,
            is_token=is_token,
            learned=learned,
            bounds=bounds,
            units=units,
            columns=dict(zip(to_move, moved, strict=True)) | computed,
        )

    def add_column(self, name: str, values: torch.Tensor) -> None:
        """Add what was computed of tokens 1 to T - 1 ([R, T - 1], on any device) as a column."""
        self.columns[name] = torch.nn.functional.pad(values, (1, 0))


def transfer(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The CPU's `tensors` on `device`, as views of one buffer that one copy brings there.

    The buffer on this side is pinned if `device` is a GPU: then the call returns before the copy is made.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    pieces = list(zip(tensors, sizes, [0, *ends], strict=False))
    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, size, start in pieces:
        buffer[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    return [moved[start : start + size].view(t.dtype).view(t.shape) for t, size, start in pieces]


@dataclass(frozen=True)
class BatchCounts:
    """What a step's whole batch consists of.

    samples; tokens, of them after cutting; learned: tokens that are learned; cut: samples that were longer
    than a row; unlearned: samples of which nothing is learned; records: units of samples that stay together.
    computed: tokens that go through the model, with padding. lost: tokens to learn that were cut off.
    work, room: the cost of all micro-batches, and what the ranks could compute meanwhile; see `work_of`.
    """

    samples: int
    tokens: int
    learned: int
    cut: int
    unlearned: int
    records: int = 0
    computed: int = 0
    lost: int = 0
    work: float = 0
    room: float = 0

    @property
    def busy_ranks(self) -> float:
        """Share of the time, by cost, for which a rank computes and does not wait for another one."""
        return self.work / self.room

    @classmethod
    def sum(cls, counts: "Iterable[BatchCounts]") -> "BatchCounts":
        """Of several parts of a batch together."""
        return cls(*map(sum, zip(*map(astuple, counts), strict=True)))


@dataclass(frozen=True)
class UpdateBatch:
    """What one update of the weights learns from.

    micros: this rank's micro-batches. Of those of all ranks: counts, and lengths of the samples in tokens,
    after cutting.
    """

    micros: list[MicroBatch]
    counts: BatchCounts
    lengths: list[int]


@dataclass(frozen=True)
class RankBatch:
    """A step's batch as one of the ranks goes through it.

    parts: what it is divided into. updates: how many there are of the weights; they go through the parts in
    turn. Of the whole batch: its sampler's temperature, counts, digest, metrics, and the position behind it.
    scored: this rank's micro-batches of what is scored before the step, and not learned from.
    """

    parts: list[UpdateBatch]
    updates: int
    temperature: float
    counts: BatchCounts
    digest: str
    metrics: dict[str, float]
    position: dict[str, Any] | None = None
    scored: list[MicroBatch] = field(default_factory=list[MicroBatch])

    @property
    def micros(self) -> list[MicroBatch]:
        """This rank's micro-batches of all parts."""
        return [micro for part in self.parts for micro in part.micros]


def make_rank_batch(
    batch: Batch,
    config: TrainerBase,
    *,
    rank: int,
    world_size: int,
    arrange: Arrange | None = None,
    mini_batches: int = 1,
    updates: int = 1,
    spread: bool = False,
) -> RankBatch:
    """Cut what is too long, pack (or arrange in rows otherwise), and count.

    Args:
        rank, world_size: on the layout's data axis; ranks that share samples get the same batch.
        spread: whether no rank is to be without work, where there are samples enough; how they are packed
            then depends on the number of ranks, and sums differ in their last bits.
        mini_batches: parts to divide the batch into. Each takes every so many-th unit of samples, so that the
            answers to one prompt are spread over the parts.
        updates: of the weights; they go through the parts in turn.
    """
    together, masks = batch.together, batch.loss_masks
    how: dict[str, Any] = {
        "row_length": config.seq_len,
        "rows_each": config.rows,
        "tokens": config.micro_batch_tokens,
        "arrange": arrange or shared_rows,
    }
    mini_batches = max(1, min(mini_batches, len(masks) // together))
    parts: list[UpdateBatch] = []
    for number in range(mini_batches):
        starts = range(number * together, len(masks), mini_batches * together)
        chosen = [i for start in starts for i in range(start, start + together)]
        whole = [len(masks[i]) for i in chosen]
        learned = [int(np.count_nonzero(masks[i][1 : config.seq_len])) for i in chosen]
        lengths = [min(length, config.seq_len) for length in whole]
        groups = group_rows(lengths, **how, together=together, ranks=world_size if spread else 1)
        work, room = work_of(groups, lengths, world_size)
        own = sorted(i for group in groups[rank::world_size] for row in group for i in row)
        taken = batch.take([chosen[i] for i in own])
        samples = dict(zip(own, (sample.cut(config.seq_len) for sample in taken), strict=True))
        micros = fill_groups(groups, samples, batch.columns, rank, world_size, together)
        counts = BatchCounts(
            samples=len(lengths),
            tokens=sum(lengths),
            learned=sum(learned),
            cut=sum(length > config.seq_len for length in whole),
            unlearned=learned.count(0),
            records=len(lengths) // together,
            computed=sum(computed_tokens(group, lengths) for group in groups),
            lost=sum(int(np.count_nonzero(masks[i][config.seq_len :])) for i in chosen),
            work=work,
            room=room,
        )
        parts.append(UpdateBatch(micros, counts, lengths))
    scored = (
        make_micro_batches(
            [sample.cut(config.seq_len) for sample in batch.scored], rank=rank, world_size=world_size, **how
        )
        if batch.scored
        else []
    )
    return RankBatch(
        parts=parts,
        updates=updates,
        temperature=batch.sampling.temperature,
        counts=BatchCounts.sum(part.counts for part in parts),
        digest=batch.digest(),
        metrics=batch.metrics,
        position=batch.position,
        scored=scored,
    )


def pack(lengths: list[int], row_length: int) -> list[list[int]]:
    """Which samples share a row: as many rows as first-fit decreasing needs, filled evenly.

    Rows of even length need less padding.

    Raises:
        ValueError: a sample is longer than a row.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if longest_first and lengths[longest_first[0]] > row_length:
        longest = lengths[longest_first[0]]
        raise ValueError(f"a sample of {longest} tokens does not fit into a row of {row_length}")
    tight: list[list[int]] = []
    room = np.full(len(lengths), row_length)
    for i in longest_first:
        row = int((room[: len(tight) + 1] >= lengths[i]).argmax())  # the first; a new row has room
        if row == len(tight):
            tight.append([])
        tight[row].append(i)
        room[row] -= lengths[i]
    even = _dealt_evenly(lengths, longest_first, len(tight), len(lengths))
    return even if max(sum(lengths[i] for i in row) for row in even) <= row_length else tight


def _dealt_evenly(
    costs: Sequence[float], costliest_first: Iterable[int], count: int, most: int
) -> list[list[int]]:
    """Items by number in `count` bins of at most `most`, each in the one that costs least so far (longest
    processing time, Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins: list[tuple[float, int]] = [(0, number) for number in range(count)]
    for item in costliest_first:
        cost, number = heapq.heappop(open_bins)
        bins[number].append(item)
        if len(bins[number]) < most:
            heapq.heappush(open_bins, (cost + costs[item], number))
    return bins


def shared_rows(units: list[list[int]], row_length: int) -> list[list[list[int]]]:
    """As few rows as `pack` needs; the samples of a unit are neighbours in one row."""
    numbers = _numbered(units)
    rows = pack([sum(lengths) for lengths in units], row_length)
    return [[[i for unit in row for i in numbers[unit]]] for row in rows]


def one_a_row(units: list[list[int]], row_length: int) -> list[list[list[int]]]:
    """Every sample in a row of its own, with padding behind it."""
    return [[[i] for i in unit] for unit in _numbered(units)]


def _numbered(units: list[list[int]]) -> list[list[int]]:
    """The numbers of each unit's samples."""
    numbers = itertools.count()
    return [[next(numbers) for _ in lengths] for lengths in units]


def make_micro_batches(
    samples: list[Sample],
    *,
    row_length: int,
    rows_each: int,
    rank: int,
    world_size: int,
    tokens: int | None = None,
    arrange: Arrange = shared_rows,
    together: int = 1,
) -> list[MicroBatch]:
    """This rank's micro-batches of a step, in which `group_rows` puts the samples."""
    lengths = [len(sample.token_ids) for sample in samples]
    how = {"row_length": row_length, "rows_each": rows_each, "tokens": tokens, "together": together}
    groups = group_rows(lengths, **how, arrange=arrange)
    own = dict(enumerate(samples))
    return fill_groups(groups, own, columns_of(samples), rank, world_size, together)


PAIR = 1 / 50_000
"""Cost of a pair of tokens of one sample, where a token costs 1. For each token that a token looks at,
attention takes about 1 / (12 H) of what the products with weights take in a model with H hidden units; here
4096."""


def group_rows(
    lengths: list[int],
    *,
    row_length: int,
    rows_each: int,
    tokens: int | None = None,
    arrange: Arrange = shared_rows,
    together: int = 1,
    ranks: int = 1,
) -> list[Group]:
    """The rows of each micro-batch of a step, on whichever rank it runs.

    A micro-batch has at most `rows_each` rows of `row_length` tokens, or a larger number of shorter rows with
    as many tokens in all: attention costs less in short rows. A unit that does not fit into that has a
    micro-batch of its own. Rows are dealt out evenly, the fullest first, so that micro-batches that run at
    the same time take equally long.

    Args:
        lengths: of the samples.
        tokens: of a micro-batch, in place of `rows_each` rows; units with more have one alone.
        together: so many samples in a row are a unit, whose row may be as many times longer.
        ranks: there are to be micro-batches for all of so many ranks each time, if there are rows enough.
    """
    units = [lengths[start : start + together] for start in range(0, len(lengths), together)]
    numbers = _numbered(units)
    most = tokens or row_length * together

    def arranged(chosen: Sequence[int], width: int) -> list[Group]:
        flat = [i for unit in chosen for i in numbers[unit]]
        blocks = arrange([units[unit] for unit in chosen], width)
        return [[[flat[i] for i in row] for row in block] for block in blocks]

    sizes = list(map(sum, units))
    shared = [unit for unit, size in enumerate(sizes) if size <= most]
    longest_first = sorted((u for u, size in enumerate(sizes) if size > most), key=lambda unit: -sizes[unit])
    alone = [[row for block in arranged([unit], sizes[unit]) for row in block] for unit in longest_first]
    if not shared:
        return alone
    width = min(most, max(*(sizes[unit] for unit in shared), ROW_TOKENS))
    blocks = arranged(shared, width)
    pair = PAIR if ranks > 1 else 0.0
    blocks.sort(key=lambda block: -_cost(block, lengths, pair))
    tallest = max(len(block) for block in blocks)
    block_tokens = (
        width if tallest == 1 else tallest * max(lengths[i] for b in blocks for row in b for i in row)
    )
    each = max((tokens or rows_each * row_length) // block_tokens, 1)
    count = -(-(len(alone) - (-len(blocks) // each)) // ranks) * ranks - len(alone)
    count = min(count, len(blocks))
    if ranks == 1:
        ends = [len(blocks) * (index + 1) // count for index in range(count)]
        groups = [blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    else:
        costs = [_cost(block, lengths, pair) for block in blocks]
        dealt = _dealt_evenly(costs, range(len(blocks)), count, each)
        dealt.sort(key=lambda group: -sum(costs[number] for number in group))
        groups = [[blocks[number] for number in group] for group in dealt]
    return [*alone, *([row for block in group for row in block] for group in groups)]


def _cost(rows: Group, lengths: Sequence[int], pair: float) -> float:
    """Of the samples in these rows: their tokens, and `pair` for each pair of tokens of a sample."""
    return sum(lengths[i] + pair * lengths[i] ** 2 for row in rows for i in row)


def work_of(groups: list[Group], lengths: Sequence[int], ranks: int) -> tuple[float, float]:
    """What all micro-batches cost, and what the ranks could compute while the costliest of each round runs.

    The ranks run in lockstep, since they gather weights from each other.
    """
    costs = [_cost(group, lengths, PAIR) for group in groups]
    rounds = [costs[start : start + ranks] for start in range(0, len(costs), ranks)]
    return sum(costs), sum(ranks * max(one) for one in rounds)


def fill_groups(
    groups: list[Group],
    samples: Mapping[int, Sample],
    columns: Sequence[str],
    rank: int,
    world_size: int,
    together: int,
) -> list[MicroBatch]:
    """This rank's micro-batches: number rank, rank + world_size, ... of the whole step's.

    How samples are packed does not depend on the number of ranks. Every rank gets equally many micro-batches,
    since the ranks run in lockstep; empty ones, from which nothing is learned, make up the number.

    Args:
        samples: by number, of this rank's micro-batches at least.
        columns: that the samples of the batch have.
    """
    return [
        fill_rows([[samples[i] for i in row] for row in group], index, columns, together)
        for index in range(rank, -(-len(groups) // world_size) * world_size, world_size)
        for group in (groups[index] if index < len(groups) else [],)
    ]


def computed_tokens(group: Group, lengths: Sequence[int]) -> int:
    """Tokens of a micro-batch of these rows, which are as long as the longest, and have 2 tokens or more."""
    return len(group) * max(2, *(sum(lengths[i] for i in row) for row in group))


def fill_rows(
    rows: list[list[Sample]], index: int = 0, columns: Iterable[str] = (), together: int = 1
) -> MicroBatch:
    """The micro-batch of these rows of samples, as long as the longest row; the samples have `columns`.

    Args:
        together: so many samples in a row, counted through all rows, are a unit.
    """
    samples = [sample for row in rows for sample in row]
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    tokens = np.bincount(row_of, lengths, minlength=max(len(rows), 1)).astype(np.int64)  # of each row
    shape = (len(tokens), max(tokens.max(), 2))
    before = np.cumsum(lengths) - lengths  # tokens of earlier samples
    starts = row_of * shape[1] + before - (np.cumsum(tokens) - tokens)[row_of]
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    places = np.repeat(starts, lengths) + within

    def spread(values: list[np.ndarray], dtype: type[np.generic], default: float = 0) -> np.ndarray:
        of_each = values[0].shape[1:] if values else ()
        filled = np.full((*shape, *of_each), default, dtype)
        if values:
            filled.reshape(-1, *of_each)[places] = np.concatenate(values)
        return filled

    input_ids = spread([sample.token_ids for sample in samples], np.int64)
    position_ids = np.arange(shape[1]) - tokens[:, None]  # padding is a sample of its own
    position_ids.reshape(-1)[places] = within
    loss_mask = spread([sample.loss_mask for sample in samples], np.bool_)
    loss_mask.reshape(-1)[starts] = False  # nothing predicts a first token
    of_tokens = {
        name: spread([sample.columns[name] for sample in samples], COLUMNS[name].dtype, COLUMNS[name].default)
        for name in columns
    }
    bounds = np.append(np.flatnonzero(position_ids == 0), position_ids.size)
    return MicroBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(loss_mask),
        torch.from_numpy(spread([np.ones(len(places), np.bool_)], np.bool_)),
        {name: torch.from_numpy(values) for name, values in of_tokens.items()},
        learned=torch.from_numpy(np.flatnonzero(loss_mask)),
        bounds=torch.from_numpy(bounds.astype(np.int32)),
        samples=len(bounds) - 1,
        longest=int(np.diff(bounds).max()),
        tokens=len(places),
        index=index,
        units=torch.from_numpy(np.searchsorted(bounds, starts).reshape(-1, together)),
    )
