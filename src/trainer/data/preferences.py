"""Answers of preference records as samples, in an order that does not depend on the number of ranks."""

import bisect
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.config.preferences import TOGETHER, PreferenceDataConfig
from cairn.run.batches import Sample
from cairn.run.data_sets import ROWS_AT_ONCE, BadRecord
from cairn.run.errors import UsageError
from cairn.trainer.data.opening import RecordOrder, Taken, identity_of_all
from cairn.trainer.data.preference_forms import FORMS, mismatched, name_of
from cairn.trainer.data.rendering import Encoder, RecordRefused
from cairn.trainer.data.shares import EncodedRecords, RecordShares
from cairn.trainer.data.sources import Indexed

logger = logging.getLogger(__name__)

CACHED_TOKENS = 1 << 24
"""Encoded records are kept for later epochs up to so many tokens."""
FIRST_RECORDS = 64
"""A run does not start if nothing can be learned from this many of its first records, or its first batch."""
WARNINGS = 5
"""So many records from which nothing is learned are named in the log; metrics count all of them."""

Answer = tuple[Mapping[str, Any], int]
"""A record of prompt and completion, and its side."""


class PreferenceData:
    """The answers of each unit of learning, in the order of training. A unit is a record; `Examples` has
    others.
    """

    names: Mapping[int, str] = {1: "the chosen answer", -1: "the rejected answer"}
    """By side, what messages call an answer."""

    def __init__(
        self,
        config: PreferenceDataConfig,
        form: str,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        position: int = 0,
        *,
        state: Mapping[str, Any] | None = None,
        row_length: int,
        template_arguments: Mapping[str, Any] | None = None,
        rows: int | None = None,
        shares: RecordShares | None = None,
    ):
        """Open the data sets, and go on behind the first `position` units.

        Args:
            form: a name in `forms.FORMS`.
            state: of the data sets there, as `RecordOrder.state` returned it.
            row_length: tokens after which an answer is cut, or its record dropped.
            template_arguments: what the chat template gets beside the messages.
            rows: tokens that the model knows; None: all.
            shares: among ranks that all take the same units at the same time.

        Raises:
            BadRecord: a data set can't be read.
        """
        self.config = config
        self._shares = shares or RecordShares()
        self.seed = seed
        self.form_name, self.form = form, FORMS[form]
        self.together = TOGETHER[form]
        """So many of a unit's samples are learned; those behind them are only scored."""
        self.order = RecordOrder(config, self.form, seed, position, state)
        self._encoder = Encoder(
            tokenizer, template_arguments=template_arguments, ignored=config.ignore, rows=rows
        )
        self._row_length = row_length
        self._encoded: dict[Taken, list[Sample]] = {}
        self._refused: dict[Taken, str] = {}
        """Why nothing can be learned from units that are left out."""
        self._room = CACHED_TOKENS
        self._warnings = WARNINGS

    def about_answers(self) -> list[Any]:
        """What the samples of a unit depend on, beside the records, tokenizer and length of rows."""
        return [self.form_name, self.config.too_long]

    def identity(self) -> dict[str, Any]:
        """What identifies the data; see `opening.identity_of_all`."""
        return identity_of_all(self.config, self.order.sources, self.form)

    def check_start(self) -> None:
        """Check that something can be learned from the units that a fresh run begins with.

        Raises:
            UsageError: nothing can be learned from any of a data set's units; or one can't be read.
        """
        for label, source in self.order.sources.items():
            taken = self.order.first(label, max(self.config.batch_size, FIRST_RECORDS))
            try:
                units = self.samples(taken)
            except BadRecord as error:
                raise UsageError(f"{self.config.setting} {error}") from None
            if not any(samples[0].columns["side"][0] for samples in units):
                raise UsageError(
                    f"{self.config.setting} {source.config.name}: nothing can be learned from the first "
                    f"{len(taken)} of its records, in the order of training; {self.order.where(taken[0])}: "
                    f"{self._why_not(taken[0], self._encode(taken[:1])[0])}"
                )

    def next_units(self, count: int) -> tuple[list[Taken], list[list[Sample]], dict[str, float]]:
        """The next units and their answers, and metrics of them.

        Raises:
            BadRecord: one can't be learned from.
        """
        taken = self.order.take(count)
        units = self.samples(taken)
        own = Counter(label for label, _ in taken)
        counts = {f"data/{label}/records": own[label] for label in self.order.labels if label}
        if unreadable := sum(one in self._refused for one in taken):
            counts["unreadable_records"] = unreadable
        return taken, units, {**self.order.epochs(), **counts}

    def samples(self, taken: Sequence[Taken]) -> list[list[Sample]]:
        """The answers of each unit, with the column `side`; that is 0 if nothing is learned from them.

        Raises:
            BadRecord: one can't be learned from.
        """
        wanted = [one for one in dict.fromkeys(taken) if one not in self._encoded]
        new = dict(zip(wanted, self._encode(wanted), strict=True)) if wanted else {}
        found = [self._encoded.get(one) or self._unit(one, new[one]) for one in taken]
        for one, unit in zip(taken, found, strict=True):
            tokens = sum(len(sample.token_ids) for sample in unit)
            if one in new and tokens <= self._room and self.order.sources[one[0]].repeats:
                self._room -= tokens if one not in self._encoded else 0
                self._encoded[one] = unit
        return found

    def _unit(self, one: Taken, answers: list[Sample]) -> list[Sample]:
        why_not = self._why_not(one, answers)
        if why_not and self._warnings:
            self._warnings -= 1
            logger.warning("nothing is learned from %s: %s", self.order.where(one), why_not)
        unit: list[Sample] = []
        for sample in answers:
            # Of what is not learned from, a token stays, which stands for it in counts.
            unit.append(_with_side(sample.cut(1).unlearned(), 0) if why_not else sample)
        return unit

    def _why_not(self, one: Taken, answers: list[Sample]) -> str | None:
        """Why nothing is learned from a unit, or None."""
        if one in self._refused:
            return self._refused[one]
        for sample in answers[: self.together]:
            side = int(sample.columns["side"][0]) if len(sample.token_ids) else 0
            name = self.names.get(side, "an answer")
            if not sample.loss_mask[1:].any():
                return f"{name} has no turn of the assistant, and only those are learned"
            if not sample.loss_mask[1 : self._row_length].any():
                first = int(sample.loss_mask.argmax())
                return (
                    f"{first} tokens come before the first of {name} that is learned, and "
                    f"--seq-len {self._row_length} cuts it before that"
                )
            if self.config.too_long == "drop" and len(sample.token_ids) > self._row_length:
                return (
                    f"{name} ends after {len(sample.token_ids)} tokens, and --data.too-long drop "
                    f"leaves out what is longer than --seq-len {self._row_length}"
                )
        return None

    def _encode(self, taken: Sequence[Taken]) -> list[list[Sample]]:
        """The answers of each unit, with their sides as a column."""
        found: dict[Taken, list[Sample]] = {}
        for label in self.order.labels:
            numbers = [number for whose, number in taken if whose == label]
            if not numbers:
                continue
            samples, refused = self._shares.make(numbers, partial(self._make, label))
            self._refused |= {(label, number): why for number, why in refused.items()}
            found |= zip([(label, number) for number in numbers], samples, strict=True)
        return [found[one] for one in taken]

    def _make(self, label: str, numbers: Sequence[int]) -> EncodedRecords:
        """The samples of units of one data set.

        Raises:
            RecordRefused: one can't be learned from, and that is to end the run.
        """
        samples = self._encode_units(label, numbers, self._answers(label, numbers))
        refused = {n: self._refused[label, n] for n in numbers if (label, n) in self._refused}
        return EncodedRecords(samples, refused)

    def _encode_units(
        self, label: str, numbers: Sequence[int], units: list[list[Answer]]
    ) -> list[list[Sample]]:
        """The samples of units; of a unit that is left out, placeholders of one token each.

        Raises:
            RecordRefused: one can't be learned from, and that is to end the run.
        """
        try:
            samples = iter(
                self._encoder.whole(
                    [answer for unit in units for answer, _ in unit],
                    [number for number, unit in zip(numbers, units, strict=True) for _ in unit],
                    self.order.sources[label].where,
                )
            )
            if all(units):
                return [[_with_side(next(samples), side) for _, side in unit] for unit in units]
        except RecordRefused as error:
            if self.config.unreadable == "error":
                raise
            if len(units) == 1:
                self._refused[label, numbers[0]] = error.why
        if len(units) == 1:
            stands = _with_side(Sample(np.zeros(1, np.int32), np.zeros(1, np.bool_)), 0)
            return [[stands for _ in range(len(units[0]) or self.together)]]
        return [
            self._encode_units(label, [number], [unit])[0]
            for number, unit in zip(numbers, units, strict=True)
        ]

    def _answers(self, label: str, numbers: Sequence[int]) -> list[list[Answer]]:
        """The answers of each of these units of a data set; none of a record that is left out."""
        units: list[list[Answer]] = []
        for number, record in zip(numbers, self.order.sources[label].read(numbers), strict=True):
            drops = self.form.drops and self.config.unreadable == "drop"
            if drops and (problem := self.form.problem_of(record)):
                self._refused[label, number] = problem
                units.append([])
            else:
                units.append(list(zip(self.form.answers(record), self.form.sides(record), strict=True)))
        return units


def _with_side(sample: Sample, side: int) -> Sample:
    """The sample, with its side as a column."""
    column = np.full(len(sample.token_ids), side, np.int8)
    return Sample(sample.token_ids, sample.loss_mask, {"side": column})


class Examples(PreferenceData):
    """Single answers, each desirable or undesirable: one of a record, or the two of a pair one by one.

    Beside its answer, a unit has another record's answer to its prompt, which is only scored: how likely such
    answers are is what the answers that are learned are compared with. Which one that is depends on the seed
    alone, so that the reference scores it once.
    """

    names = {1: "the desirable answer", -1: "the undesirable answer"}

    def __init__(self, config: PreferenceDataConfig, *arguments: Any, **named: Any):
        """Open the data sets, as `PreferenceData` does.

        Raises:
            BadRecord: all answers of a data set are to the same prompt.
        """
        super().__init__(config, *arguments, **named)
        self._mismatched: dict[str, list[int]] = {}
        for label, source in indexed(self.order).items():
            prompts: list[bytes] = []
            for start in range(0, len(source), ROWS_AT_ONCE):
                numbers = range(start, min(start + ROWS_AT_ONCE, len(source)))
                prompts += [name_of(answer["prompt"]) for answer, _ in self._own(label, numbers)]
            found = mismatched(prompts, self.seed)
            if found is None:
                raise BadRecord(
                    f"{source.config.name}: all answers are to the same prompt; to learn from single answers "
                    "there must be answers to other prompts that they are compared with"
                )
            self._mismatched[label] = found

    def about_answers(self) -> list[Any]:
        return [*super().about_answers(), self.seed]

    def _own(self, label: str, numbers: Sequence[int]) -> list[Answer]:
        """A data set's answers of these numbers, which count all of its answers."""
        return [
            unit[number % len(unit)]
            for number, unit in zip(numbers, super()._answers(label, numbers), strict=True)
        ]

    def _answers(self, label: str, numbers: Sequence[int]) -> list[list[Answer]]:
        own = self._own(label, numbers)
        others = self._own(label, [self._mismatched[label][number] for number in numbers])
        return [
            [(one, side), ({**one, "completion": other["completion"]}, side)]
            for (one, side), (other, _) in zip(own, others, strict=True)
        ]


KINDS: dict[str, type[PreferenceData]] = {"pairs": PreferenceData, "examples": Examples}
"""By form."""


def open_preferences(
    config: PreferenceDataConfig, form: str, *arguments: Any, **named: Any
) -> PreferenceData:
    """The data of a form; see `PreferenceData`."""
    return KINDS[form](config, form, *arguments, **named)


def indexed(order: RecordOrder) -> dict[str, Indexed]:
    """The data sets by label, all of which must be known as a whole.

    Raises:
        UsageError: one is read as a stream.
    """
    found: dict[str, Indexed] = {}
    for label, source in order.sources.items():
        if not isinstance(source, Indexed):
            raise UsageError(
                f"{source.config.name} is read as a stream, and not as a whole, which this loss needs; give "
                'it read = "indexed"'
            )
        found[label] = source
    return found


class Numbers:
    """Numbers the units of all data sets, one data set after the other."""

    def __init__(self, order: RecordOrder):
        """Count them.

        Raises:
            UsageError: a data set is read as a stream.
        """
        lengths = {label: len(source) for label, source in indexed(order).items()}
        self._labels = list(lengths)
        self._ends = list(itertools.accumulate(lengths.values()))
        self._starts = dict(zip(lengths, [0, *self._ends], strict=False))

    def __len__(self) -> int:
        """How many units there are."""
        return self._ends[-1]

    def of(self, one: Taken) -> int:
        """A unit's number."""
        return self._starts[one[0]] + one[1]

    def at(self, number: int) -> Taken:
        """The unit of a number."""
        label = self._labels[bisect.bisect_right(self._ends, number)]
        return label, number - self._starts[label]
