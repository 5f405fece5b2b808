"""Records of preferences as samples, in a seeded order that does not depend on the number of ranks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.config.pair_loss import TOGETHER
from cairn.config.preferences import PreferenceDataConfig
from cairn.run.batches import Sample
from cairn.run.data_sets import ROWS_AT_ONCE, BadRecord, as_written, load_records, locate
from cairn.run.errors import UsageError
from cairn.run.seeds import permutation
from cairn.trainer.data.examples import mismatched, name_of
from cairn.trainer.data.forms import FORMS, identity_of
from cairn.trainer.data.rendering import encode

logger = logging.getLogger(__name__)

CACHED_TOKENS = 1 << 24
"""Encoded records are kept for later epochs up to so many tokens."""
FIRST_RECORDS = 64
"""A run does not start if nothing can be learned from this many of its first records, or its first batch."""
WARNINGS = 5
"""So many records from which nothing is learned are named in the log; metrics count all of them."""


class PreferenceData:
    """The answers of each unit of learning, and the order of the units: epochs, each in a seeded order of its
    own. A unit is a record; `Examples` has others.
    """

    names: Mapping[int, str] = {1: "the chosen answer", -1: "the rejected answer"}
    """By side, what messages call an answer."""

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
        self.form_name, self.form = form, FORMS[form]
        self.together = TOGETHER[form]
        """So many of a unit's samples are learned; those behind them are only scored."""
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
        """The number of units."""
        return len(self.records)

    def about_answers(self) -> list[Any]:
        """What the samples of a unit depend on, beside the records, tokenizer and length of rows."""
        return [self.form_name, self.config.too_long]

    def identity(self) -> dict[str, Any]:
        """See `forms.identity_of`."""
        return identity_of(self.config, self.form_name, self.records)

    def check_start(self) -> None:
        """Check that something can be learned from the units that a fresh run begins with.

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
                f"{len(self)} records, in the order of training; {self._where(indices[0])}: "
                f"{self._why_not(self._encode(indices[:1])[0])}"
            )

    def indices(self, position: int, count: int) -> list[int]:
        """The units from `position` on, counted from the begin of the first epoch."""
        return [self._index(position + i) for i in range(count)]

    def samples(self, indices: Sequence[int]) -> list[list[Sample]]:
        """The answers of each unit, with the column `side`; that is 0 if nothing is learned from them.

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
            logger.warning("nothing is learned from %s: %s", self._where(index), why_not)
        unit: list[Sample] = []
        for sample, side in answers:
            # Of what is not learned from, a token stays, which stands for it in counts.
            kept = sample.cut(1).unlearned() if why_not else sample
            column = np.full(len(kept.token_ids), 0 if why_not else side, np.int8)
            unit.append(Sample(kept.token_ids, kept.loss_mask, {"side": column}))
        return unit

    def _why_not(self, answers: list[tuple[Sample, int]]) -> str | None:
        """Why nothing is learned from a unit, or None."""
        for sample, side in answers[: self.together]:
            if not sample.loss_mask[1:].any():
                return f"{self.names[side]} has no turn of the assistant, and only those are learned"
            if not sample.loss_mask[1 : self._row_length].any():
                first = int(sample.loss_mask.argmax())
                return (
                    f"{first} tokens come before the first of {self.names[side]} that is learned, and "
                    f"--seq-len {self._row_length} cuts it before that"
                )
            if self.config.too_long == "drop" and len(sample.token_ids) > self._row_length:
                return (
                    f"{self.names[side]} ends after {len(sample.token_ids)} tokens, and --data.too-long drop "
                    f"leaves out what is longer than --seq-len {self._row_length}"
                )
        return None

    def _encode(self, indices: Sequence[int]) -> list[list[tuple[Sample, int]]]:
        """The answers of each unit, with their sides."""
        records = self._records(indices)
        answers = [self.form.answers(record) for record in records]
        sides = [self.form.sides(record) for record in records]
        return self._encoded_answers(indices, answers, sides)

    def _encoded_answers(
        self,
        indices: Sequence[int],
        answers: Sequence[Sequence[Mapping[str, Any]]],
        sides: Sequence[Sequence[int]],
    ) -> list[list[tuple[Sample, int]]]:
        """Answers of units, each a record of prompt and completion, as samples with their sides."""
        samples = iter(
            encode(
                [answer for of_unit in answers for answer in of_unit],
                self._tokenizer,
                [index for index, of_unit in zip(indices, answers, strict=True) for _ in of_unit],
                where=self._where,
                template_arguments=self._template_arguments,
            )
        )
        return [[(next(samples), side) for side in of_unit] for of_unit in sides]

    def _where(self, index: int) -> str:
        return locate(self.config, index)

    def _records(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        columns, features = self.records[list(indices)], self.records.features
        return [
            as_written(dict(zip(columns, row, strict=True)), features)
            for row in zip(*columns.values(), strict=True)
        ]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if not self.config.shuffle:
            return place
        if epoch != self._epoch:
            self._order = permutation(len(self), self._seed, "preference order", epoch)
            self._epoch = epoch
        return self._order[place]


class Examples(PreferenceData):
    """Single answers, each desirable or undesirable: one of a record, or the two of a pair one by one.

    Beside its answer, a unit has another record's answer to its prompt, which is only scored: how likely such
    answers are is what the answers that are learned are compared with. Which one that is depends on the seed
    alone, so that the reference scores it once.
    """

    names = {1: "the desirable answer", -1: "the undesirable answer"}

    def __init__(self, config: PreferenceDataConfig, *arguments: Any, **named: Any):
        """Read the records, as `PreferenceData` does.

        Raises:
            BadRecord: all of them have the same prompt.
        """
        super().__init__(config, *arguments, **named)
        self._each = self.form.units(self.records)
        prompts: list[bytes] = []
        for start in range(0, len(self), ROWS_AT_ONCE):
            numbers = range(start, min(start + ROWS_AT_ONCE, len(self)))
            prompts += [name_of(answer["prompt"]) for answer, _ in self._answers(numbers)]
        found = mismatched(prompts, self._seed)
        if found is None:
            raise BadRecord(
                f"{config.name}: all answers are to the same prompt; to learn from single answers there must "
                "be answers to other prompts that they are compared with"
            )
        self._mismatched = found

    def __len__(self) -> int:
        """The number of answers."""
        return self._each * len(self.records)

    def about_answers(self) -> list[Any]:
        return [*super().about_answers(), self._seed]

    def _answers(self, numbers: Sequence[int]) -> list[tuple[Mapping[str, Any], int]]:
        """The answers of these numbers, as records of prompt and completion, and their sides."""
        records = self._records([number // self._each for number in numbers])
        places = [number % self._each for number in numbers]
        return [
            (self.form.answers(record)[place], self.form.sides(record)[place])
            for place, record in zip(places, records, strict=True)
        ]

    def _encode(self, indices: Sequence[int]) -> list[list[tuple[Sample, int]]]:
        own = self._answers(indices)
        others = self._answers([self._mismatched[index] for index in indices])
        answers = [
            [one, {**one, "completion": other["completion"]}]
            for (one, _), (other, _) in zip(own, others, strict=True)
        ]
        return self._encoded_answers(indices, answers, [[side] * 2 for _, side in own])

    def _where(self, index: int) -> str:
        return locate(self.config, index // self._each)


KINDS: dict[str, type[PreferenceData]] = {"pairs": PreferenceData, "examples": Examples}
"""By form."""


def open_preferences(
    config: PreferenceDataConfig, form: str, *arguments: Any, **named: Any
) -> PreferenceData:
    """The data of a form; see `PreferenceData`."""
    return KINDS[form](config, form, *arguments, **named)
