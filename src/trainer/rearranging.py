"""Micro-batches in other rows: for a model that needs each sample in a row of its own, unlike the policy.

The samples of a micro-batch stay together, so that a sample's rows do not depend on the number of ranks.
"""

import itertools

import numpy as np
import torch

from cairn.config.trainer import TrainerBase
from cairn.run.batches import Sample
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import reshard
from cairn.trainer.packing import MicroBatch, RankBatch, fill_rows, group_rows, one_a_row
from cairn.trainer.scoring.tokens import Scorer


@torch.no_grad()
def add_logprobs_alone(
    batch: RankBatch, name: str, scorer: Scorer, config: TrainerBase, group: RankGroup
) -> None:
    """As `scoring.add_logprobs`, with each sample in a row of its own; all ranks call it.

    The model must be in evaluation mode. Rows hold no more tokens at a time than the policy's micro-batches.
    """
    split = [_alone(micro, config) for micro in batch.micros]
    rounds = [
        max(counts) for counts in zip(*group.gather_objects([len(parts) for parts in split]), strict=True)
    ]
    try:
        for micro, parts, count in zip(batch.micros, split, rounds, strict=True):
            found = torch.zeros(micro.input_ids.numel(), device=group.device)
            # The ranks run in lockstep: empty rows make up for the parts that others have more of.
            for part, places in parts + [_nothing()] * (count - len(parts)):
                part = part.to(group.device)
                values = scorer.logprobs(part, batch.temperature)
                values = torch.nn.functional.pad(values, (1, 0)).flatten()[part.learned]
                found[places.to(group.device)] = values
            micro.columns[name] = found.view(micro.input_ids.shape)
    finally:
        reshard(scorer.model)


def _alone(micro: MicroBatch, config: TrainerBase) -> list[tuple[MicroBatch, torch.Tensor]]:
    """Its samples in micro-batches of a sample a row; for each the places of its learned tokens in `micro`.

    Places are int64 [L], in the flattened rows.
    """
    ids, mask, is_token = (
        tensor.flatten().numpy() for tensor in (micro.input_ids, micro.loss_mask, micro.is_token)
    )
    bounds = micro.bounds.numpy()
    spans = [slice(start, end) for start, end in itertools.pairwise(bounds) if is_token[start]]
    if not spans:
        return []
    samples = [Sample(ids[span].astype(np.int32), mask[span], {}) for span in spans]
    groups = group_rows(
        [len(sample.token_ids) for sample in samples],
        row_length=config.seq_len,
        rows_each=config.micro_batch_size,
        arrange=one_a_row,
    )
    parts = []
    for rows in groups:
        numbers = [number for row in rows for number in row]
        places = [spans[number].start + np.flatnonzero(samples[number].loss_mask) for number in numbers]
        part = fill_rows([[samples[number]] for number in numbers], micro.index)
        parts.append((part, torch.from_numpy(np.concatenate(places))))
    return parts


def _nothing() -> tuple[MicroBatch, torch.Tensor]:
    return fill_rows([]), torch.empty(0, dtype=torch.int64)
