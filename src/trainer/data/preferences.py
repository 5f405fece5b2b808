"""Records of preferences as samples, in a seeded order that does not depend on the number of ranks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.config.preferences import PreferenceDataConfig
from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord, as_written, examine, load_records, locate
from cairn.run.errors import UsageError
from cairn.run.seeds import permutation
from cairn.trainer.data.forms import FORMS
from cairn.trainer.data.rendering import encode

logger = logging.getLogger(__name__)

CACHED_TOKENS = 1 << 24
"""Encoded records are kept for later epochs up to so many tokens."""
FIRST_RECORDS = 64
"""A run does not start if nothing can be learned from this many of its first records, or its first batch."""
WARNINGS = 5
"""So many records from which nothing is learned are named in the log; metrics count all of them."""


class PreferenceData:
    """The samples of each record, and the order of the records: epochs, each in a seeded order of its own."""

    def __init__(
        self,
        config: PreferenceDataConfig,
        form: str,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        *,
        row_length: int,
        template_arguments: Mapping[str, Any] | None = None,
    ):
        """Read the records.

        Args:
            form: a name in `forms.FORMS`.
            row_length: tokens after which an answer is cut, or its record dropped.
            template_arguments: what the chat template gets beside the messages.
        """
        self.config = config
        self.form = FORMS[form]
        self.records = load_records(config)
        self._tokenizer = tokenizer
        self._seed = seed
        self._row_length = row_length
        self._template_arguments = template_arguments or {}
        self._epoch = -1
        self._order: list[int] = []
        self._encoded: dict[int, list[Sample]] = {}
        self._room = CACHED_TOKENS
        self._warnings = WARNINGS

    def __len__(self) -> int:
        """The number of records."""
        return len(self.records)

    def identity(self) -> dict[str, Any]:
        """See `forms.identity_of`."""
        return examine(self.config, self.records, self.form.problem_of)

    def check_start(self) -> None:
        """Check that something can be learned from the records that a fresh run begins with.

        Raises:
            UsageError: nothing can be learned from any of them; or one can't be read.
        """
        count = min(max(self.config.batch_size, FIRST_RECORDS), len(self))
        indices = self.indices(0, count)
        try:
            units = self.samples(indices)
        except BadRecord as error:
            raise UsageError(f"--data.name {error}") from None
        if not any(samples[0].columns["side"][0] for samples in units):
            raise UsageError(
                f"--data.name {self.config.name}: nothing can be learned from the first {count} of its "
                f"{len(self)} records, in the order of training; {locate(self.config, indices[0])}: "
                f"{self._why_not(self._encode(indices[:1])[0])}"
            )

    def indices(self, position: int, count: int) -> list[int]:
        """The records from `position` on, counted from the begin of the first epoch."""
        return [self._index(position + i) for i in range(count)]

    def samples(self, indices: Sequence[int]) -> list[list[Sample]]:
        """The answers of each record, cut, with the column `side`; that is 0 if nothing is learned from them.

        Raises:
            BadRecord: one can't be learned from.
        """
        wanted = [index for index in dict.fromkeys(indices) if index not in self._encoded]
        new = dict(zip(wanted, self._encode(wanted), strict=True)) if wanted else {}
        found = [self._encoded.get(index) or self._unit(index, new[index]) for index in indices]
        for index, unit in zip(indices, found, strict=True):
            tokens = sum(len(sample.token_ids) for sample in unit)
            if index in new and tokens <= self._room and index not in self._encoded:
                self._room -= tokens
                self._encoded[index] = unit
        return found

    def _unit(self, index: int, answers: list[tuple[Sample, int]]) -> list[Sample]:
        why_not = self._why_not(answers)
        if why_not and self._warnings:
            self._warnings -= 1
            logger.warning("nothing is learned from %s: %s", locate(self.config, index), why_not)
        unit: list[Sample] = []
        for sample, side in answers:
            # Of what is not learned from, a token stays, which stands for it in counts.
            kept = sample.cut(1).unlearned() if why_not else sample
            column = np.full(len(kept.token_ids), 0 if why_not else side, np.int8)
            unit.append(Sample(kept.token_ids, kept.loss_mask, {"side": column}))
        return unit

    def _why_not(self, answers: list[tuple[Sample, int]]) -> str | None:
        """Why nothing is learned from a record, or None."""
        names = {1: "the chosen answer", -1: "the rejected answer"}
        for sample, side in answers:
            if not sample.loss_mask[1:].any():
                return f"{names[side]} has no turn of the assistant, and only those are learned"
            if not sample.loss_mask[1 : self._row_length].any():
                return (
                    f"{int(sample.loss_mask.argmax())} tokens come before the first of {names[side]} that is "
                    f"learned, and --seq-len {self._row_length} cuts it before that"
                )
            if self.config.too_long == "drop" and len(sample.token_ids) > self._row_length:
                return (
                    f"{names[side]} ends after {len(sample.token_ids)} tokens, and --data.too-long drop "
                    f"leaves out what is longer than --seq-len {self._row_length}"
                )
        return None

    def _encode(self, indices: Sequence[int]) -> list[list[tuple[Sample, int]]]:
        """The answers of each record, with their sides."""
        records = self._records(indices)
        answers = [self.form.answers(record) for record in records]
        samples = iter(
            encode(
                [answer for of_record in answers for answer in of_record],
                self._tokenizer,
                [index for index, of_record in zip(indices, answers, strict=True) for _ in of_record],
                where=lambda index: locate(self.config, index),
                template_arguments=self._template_arguments,
            )
        )
        return [[(next(samples), side) for side in self.form.sides(record)] for record in records]

    def _records(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        columns, features = self.records[list(indices)], self.records.features
        return [
            as_written(dict(zip(columns, row, strict=True)), features)
            for row in zip(*columns.values(), strict=True)
        ]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.records))
        if not self.config.shuffle:
            return place
        if epoch != self._epoch:
            self._order = permutation(len(self.records), self._seed, "preference order", epoch)
            self._epoch = epoch
        return self._order[place]
