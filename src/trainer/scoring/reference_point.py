"""How far the policy is from the reference, measured on answers to other prompts than their own."""

import torch

from cairn.trainer.group import RankGroup
from cairn.trainer.losses.answers import Answers
from cairn.trainer.losses.examples import POINT
from cairn.trainer.losses.loss import LossInputs
from cairn.trainer.packing import RankBatch
from cairn.trainer.scoring.tokens import Scorer, scoring


def add_reference_point(batch: RankBatch, scorer: Scorer, group: RankGroup) -> None:
    """Add a column with the mean log-ratio of the samples that are scored, or 0 if it is below; one number.

    All ranks call it. The number is of the whole batch: it is summed in the order of micro-batches, whatever
    rank they run on. Samples without a learned token count nothing.
    """
    found: list[torch.Tensor] = []
    with scoring(scorer):
        for micro in batch.scored:
            micro = micro.to(group.device)
            inputs = LossInputs.of(scorer.logprobs(micro, batch.temperature), micro)
            counts = inputs.lengths > 0
            ratios = Answers.of(inputs, with_reference=True).ratio.double()
            found.append(torch.stack([torch.where(counts, ratios, 0.0).sum(), counts.sum().double()]))
    table = group.gather_rows(torch.stack(found)).transpose(0, 1).flatten(0, 1)  # [micro-batch, 2]
    total, count = table.cumsum(0)[-1].tolist()
    point = max(total / max(count, 1), 0.0)
    for micro in batch.micros:
        micro.columns[POINT] = torch.full(micro.input_ids.shape, point)  # float32, also of first tokens
