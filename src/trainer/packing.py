"""Samples to micro-batches: packed rows, with no attention across samples."""

from dataclasses import dataclass

import numpy as np
import torch

from cairn.run.batches import Sample


@dataclass
class MicroBatch:
    """Rows that go through the model together. R rows of T tokens, several samples in a row.

    input_ids, position_ids: int64 [R, T]; positions start at 0 with each sample, which is how the model
    knows where one ends. loss_mask: bool [R, T]. logprobs, advantages: float32 [R, T], zero for SFT.
    index: its place among the step's micro-batches, on whichever rank it runs.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    index: int

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on `device`."""
        columns = (self.input_ids, self.position_ids, self.loss_mask, self.logprobs, self.advantages)
        return MicroBatch(*(column.to(device, non_blocking=True) for column in columns), self.index)


def pack(lengths: list[int], row_length: int) -> list[list[int]]:
    """Which samples share a row: longest first, each into the first row that has room.

    Raises:
        ValueError: a sample is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > row_length:
            raise ValueError(f"a sample of {lengths[i]} tokens does not fit into a row of {row_length}")
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(row_length)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def make_micro_batches(
    samples: list[Sample], *, row_length: int, rows_each: int, rank: int, world_size: int
) -> list[MicroBatch]:
    """This rank's micro-batches of a step: number rank, rank + world_size, ... of the whole step's.

    How samples are packed does not depend on the number of ranks. Every rank gets equally many, since they
    run in step with each other: where there are too few, the last ones learn nothing.
    """
    rows = pack([len(sample.token_ids) for sample in samples], row_length)
    width = max(sum(len(samples[i].token_ids) for i in row) for row in rows)
    groups = [rows[start : start + rows_each] for start in range(0, len(rows), rows_each)]
    while len(groups) % world_size:
        groups.append([])
    return [
        _fill([[samples[i] for i in row] for row in groups[index]], rows_each, width, index)
        for index in range(rank, len(groups), world_size)
    ]


def _fill(rows: list[list[Sample]], rows_each: int, width: int, index: int) -> MicroBatch:
    shape = (rows_each, width)
    input_ids = np.zeros(shape, np.int64)
    position_ids = np.tile(np.arange(width, dtype=np.int64), (rows_each, 1))
    loss_mask = np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    advantages = np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.token_ids)
            input_ids[r, start:end] = sample.token_ids
            position_ids[r, start:end] = np.arange(end - start)
            loss_mask[r, start + 1 : end] = sample.loss_mask[1:]  # nothing predicts a first token
            if sample.logprobs is not None:
                logprobs[r, start:end] = sample.logprobs
                advantages[r, start:end] = sample.advantages
            start = end
        position_ids[r, start:] = np.arange(width - start)  # padding is a sample of its own
    columns = (input_ids, position_ids, loss_mask, logprobs, advantages)
    return MicroBatch(*map(torch.from_numpy, columns), index)
