"""Supervised fine-tuning: records of a data set, and a loss of what the assistant says in them."""

from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from cairn.config.trainer import SFTConfig
from cairn.run.batches import Batch
from cairn.run.recipe import template_arguments
from cairn.trainer.data.batches import SFTData
from cairn.trainer.data.looking import limits_of
from cairn.trainer.data.opening import identity_of_all, kept_identity
from cairn.trainer.data.shares import RecordShares
from cairn.trainer.losses import make_loss
from cairn.trainer.state import Context
from cairn.trainer.tasks.task import Task
from cairn.trainer.tasks.validation import Validations


class SFT(Task):
    """Batches are cut from the records by all ranks together, ahead of time."""

    prefetch = True

    def __init__(self, config: SFTConfig, context: Context):
        """Read the records and go on behind the last one that was trained on.

        Raises:
            BadRecord: they are not the records that the run was started with.
            UsageError: nothing can be learned from the first of them.
        """
        self.loss = make_loss(config.loss)
        recipe, state = context.recipe, context.state
        position = state.position or {"records": state.progress.total_samples}
        self._begins_at = recipe.get("data", {}).get("begins_at", 0)
        taken = position["records"] - self._begins_at
        tokenizer = AutoTokenizer.from_pretrained(context.model_folder)
        self._data = SFTData(
            config.data,
            tokenizer,
            config.seed,
            taken,
            state=position.get("sources") if taken else None,
            row_length=config.seq_len,
            template_arguments=template_arguments(recipe),
            rows=limits_of(context.model_folder).rows,
            shares=RecordShares(state.group.exchange()),
        )
        kept = kept_identity(config.data, identity_of_all(config.data, self._data.sources), recipe)
        self._data.check_start()
        self.recipe = {"data": kept}
        self._validations = Validations(config, context, tokenizer)

    @classmethod
    def preload(cls, folder: Path) -> None:
        """Import `datasets`, and what the tokenizer needs."""
        import datasets  # noqa: F401

        AutoTokenizer.from_pretrained(folder)

    def validate(self, step: int) -> Mapping[str, float]:
        """The loss of held-out records, where it is due."""
        return self._validations.run(step)

    def finished(self) -> str | None:
        """Why a validation ends the run, if one does."""
        return self._validations.exhausted()

    def next_batch(self, step: int) -> Batch:
        """The next records.

        Raises:
            BadRecord: one of them can't be trained on.
        """
        batch = self._data.next_batch(step)
        batch.position = {"records": self._begins_at + self._data.position, "sources": self._data.state()}
        batch.metrics["total_records"] = batch.position["records"]
        return batch

    def close(self) -> None:
        """Say what became of the records."""
        self._data.log_fates()
