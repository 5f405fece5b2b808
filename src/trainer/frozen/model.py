"""A model that scores batches and never changes: a reference or a teacher, sharded over the ranks."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.trainer import TrainerBase
from cairn.model.described import changed, sums_of, weight_files
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import ALONE
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, weights_in
from cairn.trainer.packing import MicroBatch, RankBatch, fill_rows, group_rows, one_a_row
from cairn.trainer.scoring.self_check import VocabularyRows, check_scorer
from cairn.trainer.scoring.tokens import Scorer, add_logprobs, make_scorer, reshard

UNFIT = {"freeze": [], "activation_checkpointing": False, "lora": None}
"""Settings of the trainer that only concern a model with gradients, and what they are without."""


class Frozen:
    """A copy of a model that has neither gradient nor optimiser, and is in no checkpoint.

    It is sharded like the policy, computes in the same data types, and holds its weights in the one that it
    computes in: a rank has 2 bytes of each weight of its shard in bfloat16, and 4 in float32.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainerBase,
        group: RankGroup,
        *,
        whose: str,
        policy: Scorer,
        sums: Mapping[str, str] | None = None,
    ):
        """Load the weights in a Hugging Face directory; all ranks call it.

        Args:
            whose: the setting that asks for it, for messages.
            policy: checked; the micro-batches that are to be scored are arranged for it.
            sums: what `sums_of` said of the weights when the run began.

        Raises:
            UsageError: they are others now, or the model can't score the policy's micro-batches.
            CheckpointError: they don't fit the model, or a file is damaged.
        """
        self.folder, self.whose = folder, whose
        self._config, self._group, self._policy = config, group, policy
        if sums is not None:
            _check_sums(folder, sums, group, whose)
        gpu = group.device.type == "cuda"
        config = config.model_copy(update=UNFIT)
        compute = DTYPES_IN_SETTINGS[config.precision.settled(gpu=gpu).compute]
        module = build_model(folder, config, group.mesh, held_as=compute).requires_grad_(False).eval()
        read_tensors(folder, weights_in(module, folder), "model", rank=group.rank)
        self._vocabulary = VocabularyRows(
            module.config, policy.model.config, group, about=f"{whose} = {folder}"
        )
        self.scorer = make_scorer(module, config, group.device)
        check_scorer(self.scorer, config, group, first=policy.rows.name)

    def add_logprobs(self, batch: RankBatch, name: str) -> None:
        """Add its logprobs of the learned tokens as column `name`; all ranks call it.

        A logprob is normalised over all rows of this model's output embeddings, also those that stand for no
        token (padding of the vocabulary), as a server's is.

        Raises:
            UsageError: a sample has a token that the model has no row for.
        """
        self._vocabulary.check(batch)
        ours, of_policy = self.scorer.rows.arrange, self._policy.rows.arrange
        if ours is of_policy or of_policy is ALONE.arrange:
            add_logprobs(batch, name, self.scorer, self._group.device)
        else:
            add_logprobs_alone(batch, name, self.scorer, self._config, self._group)


@torch.no_grad()
def _check_sums(folder: Path, sums: Mapping[str, str], group: RankGroup, whose: str) -> None:
    """Compare the files with what they were; each rank reads some of them."""
    files = weight_files(folder)
    try:
        mine = sums_of(files[group.rank :: group.world_size])
        problem = None
    except OSError as error:
        mine, problem = {}, f"{error.filename}: {error.strerror}"
    found = group.gather_objects((mine, problem))
    problem = next((problem for _, problem in found if problem), None)
    now = {name: value for part, _ in found for name, value in part.items()}
    if problem is None and (names := changed(sums, now)):
        problem = f"{names[0]} is not what it was when the run began"
    if problem:
        raise UsageError(f"{whose} = {folder}: {problem}; put back what was there")


@torch.no_grad()
def add_logprobs_alone(
    batch: RankBatch, name: str, scorer: Scorer, config: TrainerBase, group: RankGroup
) -> None:
    """As `scoring.add_logprobs`, with each sample in a row of its own; all ranks call it.

    The samples of a micro-batch stay together, so that a sample's rows do not depend on the number of ranks.
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
