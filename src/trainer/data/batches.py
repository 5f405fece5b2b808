"""Records in a seeded order that does not depend on the number of ranks, cut into batches."""

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from cairn.config.trainer import SFTDataConfig
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.data_sets import BadRecord, load_records, locate
from cairn.run.errors import UsageError
from cairn.run.seeds import permutation
from cairn.trainer.data.rendering import encode

logger = logging.getLogger(__name__)

CACHED_TOKENS = 1 << 24
"""Encoded records are kept for later epochs up to so many tokens, which take 80 MiB with their masks."""
FIRST_RECORDS = 64
"""A run does not start if nothing can be learned from this many of its first records, or its first batch."""
WARNINGS = 5
"""So many records from which nothing is learned are named in the log; metrics count all of them."""


class SFTData:
    """Cuts an endless stream of epochs, each in its own seeded order, into batches.

    `position` counts the records taken so far; a resumed run needs nothing else to go on.
    """

    def __init__(
        self,
        config: SFTDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        position: int,
        *,
        row_length: int | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ):
        """Read the records.

        Args:
            row_length: tokens after which a sample is cut, so that nothing behind them is learned.
            template_arguments: what the chat template gets beside the messages.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.position = position
        self.row_length = row_length
        self.template_arguments = template_arguments or {}
        self.records = load_records(config)
        self._epoch = -1
        self._order: list[int] = []
        self._encoded: dict[int, Sample] = {}
        self._room = CACHED_TOKENS
        self._warnings = WARNINGS

    def check_start(self) -> None:
        """Check that something can be learned from the records that a fresh run begins with.

        A resumed run checks the same records, so that a run that could begin can also go on.

        Raises:
            UsageError: nothing can be learned from any of them; or one can't be trained on.
        """
        count = min(max(self.config.batch_size, FIRST_RECORDS), len(self.records))
        indices = [self._index(i) for i in range(count)]
        try:
            samples = self._samples(indices)
        except BadRecord as error:
            raise UsageError(f"--data.name {error}") from None
        if not any(self._teaches(sample) for sample in samples):
            raise UsageError(
                f"--data.name {self.config.name}: nothing can be learned from the first {count} of its "
                f"{len(self.records)} records, in the order of training; {locate(self.config, indices[0])}: "
                f"{self._why_not(indices[0], samples[0])}"
            )

    def next_batch(self, step: int) -> Batch:
        """The next `batch_size` records; a batch may span two epochs.

        Raises:
            BadRecord: one of them can't be trained on.
        """
        indices = [self._index(self.position + i) for i in range(self.config.batch_size)]
        self.position += len(indices)
        epoch = self.position / len(self.records)
        return Batch(self._samples(indices), {"epoch": epoch}, sampling=FROM_TEXT)

    def _samples(self, indices: list[int]) -> list[Sample]:
        new = self._encode([index for index in dict.fromkeys(indices) if index not in self._encoded])
        samples = [self._encoded.get(index) or new[index] for index in indices]
        for index, sample in new.items():
            if len(sample.token_ids) <= self._room:
                self._room -= len(sample.token_ids)
                self._encoded[index] = sample
            if self._warnings and not self._teaches(sample):
                self._warnings -= 1
                why = self._why_not(index, sample)
                logger.warning("nothing is learned from %s: %s", locate(self.config, index), why)
        return samples

    def _encode(self, indices: list[int]) -> dict[int, Sample]:
        if not indices:
            return {}
        samples = encode(
            self._records(indices),
            self.tokenizer,
            indices,
            where=lambda index: locate(self.config, index),
            template_arguments=self.template_arguments,
        )
        return dict(zip(indices, samples, strict=True))

    def _records(self, indices: list[int]) -> list[dict[str, Any]]:
        columns = self.records[indices]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _teaches(self, sample: Sample) -> bool:
        """Whether any token of the sample is learned, after cutting; nothing predicts the first token."""
        return bool(sample.loss_mask[1 : self.row_length].any())

    def _why_not(self, index: int, sample: Sample) -> str:
        """Why nothing is learned of a record."""
        if sample.loss_mask[1:].any():
            first = int(sample.loss_mask.argmax())
            return (
                f"{first} tokens come before the first that is learned, and --seq-len {self.row_length} "
                "cuts the record before that"
            )
        (record,) = self._records([index])
        if isinstance(record.get("completion"), str) and not record.get("messages"):
            return "its completion is empty, and the tokenizer has no end-of-text token"
        messages = record.get("messages") or record["completion"]
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
        return (
            f"it has no turn of the assistant (roles: {roles}), and only those are learned; the role must be "
            'written "assistant"'
        )

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.records))
        if not self.config.shuffle:
            return place
        if epoch != self._epoch:
            self._order = permutation(len(self.records), self.seed, "sft order", epoch)
            self._epoch = epoch
        return self._order[place]
