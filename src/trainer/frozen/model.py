"""Models that score batches and never change: references and teachers, sharded over the ranks."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.teachers import (
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    WithTeachers,
    is_served,
)
from cairn.config.trainer import TrainerBase
from cairn.model.described import changed, sums_of, weight_files
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import ALONE
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import OLD_LOGPROBS
from cairn.trainer.losses.loss import ESTIMATORS
from cairn.trainer.models.model import build_model, weights_in
from cairn.trainer.packing import MicroBatch, RankBatch, fill_rows, group_rows, one_a_row
from cairn.trainer.scoring.self_check import VocabularyRows, check_scorer
from cairn.trainer.scoring.tokens import Scorer, add_logprobs, make_scorer
from cairn.trainer.step.critic import TOKEN_REWARDS

UNFIT = {"freeze": [], "activation_checkpointing": False, "lora": None}
"""Settings of the trainer that only concern a model with gradients, and what they are without."""


class Frozen:
    """A copy of a model that has neither gradient nor optimiser, and is in no checkpoint.

    FSDP2 shards it over all ranks, whatever lays out the policy. It computes in the policy's data types, and
    holds its weights in the one that it computes in: a rank has 2 bytes of each weight of its shard in
    bfloat16, and 4 in float32.
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
        self._layout, group = group.layout, group.beside
        self._config, self._group, self._policy = config, group, policy
        if sums is not None:
            _check_sums(folder, sums, group, whose)
        gpu = group.device.type == "cuda"
        config = config.model_copy(update=UNFIT)
        compute = DTYPES_IN_SETTINGS[config.precision.settled(gpu=gpu).compute]
        one_by_one = config.model_copy(update={"keep_gathered": False})  # it makes no backward pass
        module = build_model(folder, one_by_one, group, held_as=compute)
        module.requires_grad_(False).eval()
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
        own = self._own(batch) if self._group.repeats > 1 else batch
        ours, of_policy = self.scorer.rows.arrange, self._policy.rows.arrange
        if ours is of_policy or of_policy is ALONE.arrange:
            add_logprobs(own, name, self.scorer, self._group.device)
        else:
            add_logprobs_alone(own, name, self.scorer, self._config, self._group)
        if own is not batch:
            self._tell(batch, own, name)

    def _own(self, batch: RankBatch) -> RankBatch:
        """The micro-batches that this rank scores, of those that several ranks have: equally many on each."""
        axis, micros = self._layout.model, batch.micros
        own = micros[axis.rank :: axis.size]
        own += [fill_rows([])] * (-(-len(micros) // axis.size) - len(own))
        return replace(batch, parts=[replace(batch.parts[0], micros=own)])

    def _tell(self, batch: RankBatch, own: RankBatch, name: str) -> None:
        """Give the ranks that have the same micro-batches the column of those that each has scored."""
        layout, found = self._layout, [micro.columns[name].cpu() for micro in own.micros]
        told = self._group.gather_objects((layout.data.rank, layout.model.rank, found))
        of_ranks = {place: columns for data, place, columns in told if data == layout.data.rank}
        for number, micro in enumerate(batch.micros):
            micro.columns[name] = of_ranks[number % layout.model.size][number // layout.model.size]


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
        rows_each=config.rows,
        tokens=config.micro_batch_tokens,
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


# Teachers: logprobs of a batch's tokens under a reference and a teacher, and rewards of tokens from them.


class TeacherModels:
    """The models that score each batch before its first update.

    Rewards of tokens are computed from the policy's logprobs at the begin of the step, without gradient:
    -kl.coef * (the estimate of its divergence from the reference), and distill.coef * log(teacher / policy).
    """

    def __init__(
        self,
        config: TrainerConfig,
        group: RankGroup,
        policy: Scorer,
        sums: Mapping[str, Mapping[str, str]],
    ):
        """Load the models that are no servers; all ranks call it, once the policy's weights are loaded.

        Args:
            sums: of the weights in folders, by folder; see `cairn.model.described`.
        """
        self._group = group
        self._policy = policy
        self._kl = config.kl if config.kl and config.kl.place == "reward" else None
        self._distill = config.distill
        self._sources = config.teachers
        copies: dict[str, Frozen] = {}
        for column, source in self._sources.items():
            if not is_served(source) and source not in copies:
                whose = WithTeachers.sources_of[column]
                copies[source] = Frozen(
                    Path(source), config, group, whose=whose, policy=policy, sums=sums.get(source)
                )
        self._copies = copies

    @property
    def gives_rewards(self) -> bool:
        """Whether it changes what tokens are rewarded with."""
        return self._kl is not None or self._distill is not None

    def score(self, batch: RankBatch) -> Mapping[str, float]:
        """Add the columns of all models, and the rewards of tokens to the advantages; all ranks call it.

        The rewards are also a column, `token_rewards`, for whoever computes advantages from rewards.

        Returns:
            Metrics of the step.

        Raises:
            UsageError: the orchestrator has not asked a served model.
        """
        scored: dict[str, str] = {}
        for column, source in self._sources.items():
            if is_served(source):
                self._must_have(batch, column, source)
            elif source in scored:
                for micro in batch.micros:
                    micro.columns[column] = micro.columns[scored[source]]
            else:
                self._copies[source].add_logprobs(batch, column)
                scored[source] = column
        if not self.gives_rewards:
            return {}
        if not all(OLD_LOGPROBS in micro.columns for micro in batch.micros):
            add_logprobs(batch, OLD_LOGPROBS, self._policy, self._group.device)
        metrics = [self._reward(micro) for micro in batch.micros]
        return self._means(metrics, max(batch.counts.learned, 1))

    def _must_have(self, batch: RankBatch, column: str, source: str) -> None:
        if not all(column in micro.columns for micro in batch.micros):
            raise UsageError(
                f"{WithTeachers.sources_of[column]} = {source}: the orchestrator's batches lack its logprobs "
                f"(column {column!r}); start the orchestrator after the trainer, in the same --output-dir"
            )

    def _reward(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        """Reward the tokens of a micro-batch; returns the sums of its metrics, float64 scalars."""
        columns = micro.columns
        old = columns[OLD_LOGPROBS]
        mask = micro.loss_mask.to(old.device)
        rewards = torch.zeros_like(old)
        sums: dict[str, torch.Tensor] = {}
        if self._kl:
            assert self._kl.coef is not None, "the configuration has checked it"
            apart = torch.where(mask, old - columns[REFERENCE_LOGPROBS].to(old.device), 0.0)
            estimate = ESTIMATORS[self._kl.estimator](apart)
            rewards -= self._kl.coef * estimate
            sums["kl/reference"] = estimate.double().sum()
        if self._distill:
            gap = torch.where(mask, columns[TEACHER_LOGPROBS].to(old.device) - old, 0.0)
            rewards += self._distill.coef * gap
            sums["kl/teacher"] = -gap.double().sum()
            sums["teacher/logprob_gap"] = gap.abs().double().sum()
        columns[TOKEN_REWARDS] = rewards
        if "advantages" in columns:
            columns["advantages"] = columns["advantages"].to(old.device) + rewards
        return sums

    def _means(self, sums: list[dict[str, torch.Tensor]], tokens: int) -> dict[str, float]:
        """Over all learned tokens, summed in the order of micro-batches whatever rank they are on."""
        rows = torch.stack([torch.stack(list(row.values())) for row in sums])
        table = self._group.gather_micros(rows)  # [micro-batch, metric]
        totals = table.cumsum(0)[-1] / tokens
        return dict(zip(sums[0], totals.tolist(), strict=True))


def sums_in(recipe: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """What the trainer's recipe says of the weights in folders: sums of their files, by folder."""
    models: Mapping[str, Any] = recipe.get("models", {})
    return {model["folder"]: model["files"] for model in models.values()}
