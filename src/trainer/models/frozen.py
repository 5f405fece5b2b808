"""A model that scores batches and never changes: a reference or a teacher, sharded over the ranks."""

from collections.abc import Mapping
from pathlib import Path

import torch

from cairn.checkpoint.tensors.dtypes import DTYPES_IN_SETTINGS
from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.trainer import TrainerBase
from cairn.model.weight_digests import changed, sums_of, weight_files
from cairn.run.errors import UsageError
from cairn.trainer.attention.rows import ALONE
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, weights_in
from cairn.trainer.packing import RankBatch
from cairn.trainer.rearranging import add_logprobs_alone
from cairn.trainer.scoring.scorers import check_scorer, make_scorer
from cairn.trainer.scoring.tokens import Scorer, add_logprobs
from cairn.trainer.vocabulary import VocabularyRows

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
