"""Learning from preferences: records of answers that are better and worse than others, and a loss of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from cairn.checkpoint.step_folder import StepFolder, TrainerRecord
from cairn.config.preferences import DPOConfig, RewardConfig
from cairn.model.adapters import is_adapter
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.errors import UsageError
from cairn.run.recipe import template_arguments, tokenizer_of
from cairn.trainer.data.looking import limits_of
from cairn.trainer.data.opening import Taken, kept_identity
from cairn.trainer.data.preferences import Numbers, open_preferences
from cairn.trainer.data.shares import RecordShares
from cairn.trainer.frozen.reference import (
    ReferenceWeights,
    add_reference_point,
    kept_origin,
    reference_logps,
    to_recipe,
)
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import REFERENCE, make_loss
from cairn.trainer.models.trained import Trained
from cairn.trainer.models.value_model import RewardModel, with_reward_token
from cairn.trainer.packing import RankBatch
from cairn.trainer.state import Context
from cairn.trainer.tasks.task import Task


class DPOTask(Task):
    """Batches are cut from the records by all ranks together, ahead of time.

    For a loss that compares with a reference, that is the model that the run began with.
    """

    prefetch = True
    method = "dpo"
    """What model cards say of the weights."""

    def __init__(self, config: DPOConfig, context: Context):
        """Read the records, go on behind the last one that was trained on, and have the reference score them.

        Raises:
            BadRecord: they are not the records that the run was started with.
            UsageError: nothing can be learned from the first of them; or the reference is needed and gone.
        """
        self.loss = make_loss(config.loss)
        if self.loss.form not in (None, config.loss.form):
            raise UsageError(
                f"loss.type = {config.loss.type!r}: it learns from {self.loss.form}, and gets "
                f"{config.loss.form}: set loss.records = {self.loss.form!r}"
            )
        self._row_length, self._state = config.seq_len, context.state
        recipe, state = context.recipe, context.state
        position = state.position or {"records": state.progress.total_samples}
        self._begins_at = recipe.get("data", {}).get("begins_at", 0)
        taken = position["records"] - self._begins_at
        self._data = open_preferences(
            config.data,
            config.loss.form,
            AutoTokenizer.from_pretrained(context.model_folder),
            config.seed,
            taken,
            state=position.get("sources") if taken else None,
            row_length=config.seq_len,
            template_arguments=template_arguments(recipe),
            rows=limits_of(context.model_folder).rows,
            shares=RecordShares(state.group.exchange()),
        )
        identity = self._data.identity()
        kept = kept_identity(config.data, identity, recipe)
        self._data.check_start()
        self.recipe = {"data": kept, "method": self.method}
        self._reference: np.ndarray | None = None
        self._stopped = False
        if self.loss.needs_reference:
            self._refer(context, identity)

    @classmethod
    def preload(cls, folder: Path) -> None:
        """Import `datasets`, and what the tokenizer needs."""
        import datasets  # noqa: F401

        AutoTokenizer.from_pretrained(folder)

    def _refer(self, context: Context, identity: Mapping[str, Any]) -> None:
        resume_from, group = context.attempt.resume_from, context.state.group
        saved = (StepFolder(Path(resume_from)).trainer_state() if resume_from else None) or TrainerRecord()
        origin = kept_origin(saved.recipe)
        if origin is None:
            if is_adapter(context.model_folder):
                raise UsageError(
                    f"{resume_from} holds an adapter, and its run had no reference, so there is nothing to "
                    "compare with. Begin a new run with the merged weights, which are then the reference: "
                    f"--model.name {resume_from} with another --output-dir"
                )
            origin = ReferenceWeights.of(context.model_folder, group)
        self._numbers = Numbers(self._data.order)
        sets = identity.get("sets")
        about = {
            "records": [_content(one) for one in sets] if sets else _content(identity),
            "tokenizer": tokenizer_of(context.model_folder),
            "date": context.recipe.get("date"),
            "answers": self._data.about_answers(),
        }
        self._reference = reference_logps(
            context.run.path / "reference",
            about,
            origin,
            context.state,
            lambda numbers: self._data.samples([self._numbers.at(number) for number in numbers]),
            len(self._numbers),
            lambda: context.run.stop_requested() is not None,
        )
        self._stopped = self._reference is None
        self.recipe = {**self.recipe, "reference": to_recipe(origin)}

    def next_batch(self, step: int) -> Batch | None:
        """The next records; None if the run was asked to stop before the reference had scored them.

        Raises:
            BadRecord: one of them can't be learned from.
        """
        if self._stopped:
            return None
        order = self._data.order
        taken, found, metrics = self._data.next_units(self._data.config.batch_size)
        units = [
            [self._finished(sample, one, place) for place, sample in enumerate(unit)]
            for one, unit in zip(taken, found, strict=True)
        ]
        together = self._data.together
        scored = [] if self._reference is None else [sample for unit in units for sample in unit[together:]]
        return Batch(
            [sample for unit in units for sample in unit[:together]],
            metrics,
            sampling=FROM_TEXT,
            together=together,
            scored=scored,
            position={"records": self._begins_at + order.position, "sources": order.state()},
        )

    def prepare(self, batch: RankBatch) -> Mapping[str, float]:
        """Measure how far the policy is from the reference, if answers are there to measure it on."""
        if batch.scored:
            add_reference_point(batch, self._state.scorer, self._state.group)
        return {}

    def _finished(self, sample: Sample, one: Taken, place: int) -> Sample:
        """The sample of answer `place` of a unit as it is trained on."""
        if self._reference is None:
            return sample
        column = np.full(len(sample.token_ids), self._reference[self._numbers.of(one), place], np.float32)
        return Sample(sample.token_ids, sample.loss_mask, {**sample.columns, REFERENCE: column})


def _content(identity: Mapping[str, Any]) -> str:
    """The digest of a data set's records."""
    return str(identity.get("content") or identity["digest"])


def _megatron(folder: Path, config: RewardConfig, group: RankGroup) -> Trained:
    from cairn.trainer.models.megatron_policy import MegatronRewards  # needs megatron-core

    return MegatronRewards(folder, config, group)


REWARD_MODELS: dict[str, Callable[[Path, RewardConfig, RankGroup], Trained]] = {
    "fsdp2": RewardModel,
    "megatron": _megatron,
}
"""What makes a reward model of the model in a folder, without weights yet, by the backend's name."""


class Reward(DPOTask):
    """Trains a reward model on pairs.

    The reward of an answer is read at its last token. What a micro-batch says is learned is a token behind
    that, which stands for the reward; the model computes nothing that depends on its id.
    """

    method = "reward"

    @classmethod
    def policy(cls, config: RewardConfig, folder: Path, group: RankGroup) -> Trained:
        return REWARD_MODELS[group.backend](folder, config, group)

    def _finished(self, sample: Sample, one: Taken, place: int) -> Sample:
        return with_reward_token(sample, self._row_length)
