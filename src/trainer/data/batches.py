"""Records in a seeded order that does not depend on the number of ranks, cut into batches."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from cairn.config.data import SFTDataConfig
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.data_sets import BadRecord
from cairn.run.errors import UsageError
from cairn.trainer.data.opening import RecordOrder, Taken
from cairn.trainer.data.records import turns_of
from cairn.trainer.data.rendering import Encoder, RecordRefused
from cairn.trainer.data.shares import EncodedRecords, RecordShares
from cairn.trainer.data.sources import SFT, RecordSource

logger = logging.getLogger(__name__)

CACHED_TOKENS = 1 << 24
"""Encoded records are kept for later epochs up to so many tokens, which take 80 MiB with their masks."""
FIRST_RECORDS = 64
"""A run does not start if nothing can be learned from this many of its first records, or its first batch."""
WARNINGS = 5
"""So many records are named in the log of each kind that is not learned as it is; metrics count all."""
DROPPED_AT_MOST = 10_000
"""So many dropped records in a row end the run."""

OF_A_DATA_SET = "records", "learned_tokens"
"""What a step's metrics count of each of several data sets."""


class SFTData:
    """Cuts records, in their order of training, into batches."""

    def __init__(
        self,
        config: SFTDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        position: int,
        *,
        state: Mapping[str, Any] | None = None,
        row_length: int | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        rows: int | None = None,
        shares: RecordShares | None = None,
    ):
        """Open the data sets.

        Args:
            position: records that were taken before.
            state: of the data sets then, as `state` returned it.
            row_length: tokens after which a sample is too long.
            template_arguments: what the chat template gets beside messages and tools.
            rows: tokens that the model knows; None: all.
            shares: among ranks that all take the same records at the same time.

        Raises:
            BadRecord: a data set can't be read.
        """
        self.config = config
        self._shares = shares or RecordShares()
        self.tokenizer = tokenizer
        self.seed = seed
        self.row_length = row_length
        self._encoder = Encoder(
            tokenizer,
            template_arguments=template_arguments,
            roles=config.learn,
            ignored=config.ignore,
            rows=rows,
        )
        self._order = RecordOrder(config, SFT, seed, position, state)
        self.sources = self._order.sources
        self._encoded: dict[Taken, list[Sample]] = {}
        self._whole: dict[Taken, int] = {}
        """Of these, the records that are learned as they are, and how many tokens of each."""
        self._refused: dict[Taken, str] = {}
        """Why records are left out that can't be trained on."""
        self._room = CACHED_TOKENS
        self._fates: Counter[str] = Counter()
        """How many records were taken by this process, and what became of those not learned as they are."""

    @property
    def position(self) -> int:
        """The number of records taken so far."""
        return self._order.position

    def taken_of(self, label: str) -> int:
        """How many records of a data set were taken so far."""
        return self._order.taken_of(label)

    def state(self) -> dict[str, Any]:
        """What else saves time when a resumed run goes on from here; see `RecordOrder.state`."""
        return self._order.state()

    def check_start(self) -> None:
        """Check that something can be learned from the records that a fresh run begins with.

        A resumed run checks the same records, so that a run that could begin can also go on.

        Raises:
            UsageError: nothing can be learned from any of a data set's records; or one can't be trained on.
        """
        for label, source in self.sources.items():
            taken = self._order.first(label, max(self.config.batch_size, FIRST_RECORDS))
            try:
                samples = self._samples(taken)
                kept = [self._fitting(one, own) for one, own in zip(taken, samples, strict=True)]
            except BadRecord as error:
                raise UsageError(f"{self.config.setting} {error}") from None
            if not any(self._teaches(sample) for own in kept for sample in own):
                raise UsageError(
                    f"{self.config.setting} {source.config.name}: nothing can be learned from the first "
                    f"{len(taken)} of its records, in the order of training; {source.where(taken[0][1])}: "
                    f"{self._why_not(taken[0], samples[0])}"
                )

    def next_batch(self, step: int) -> Batch:
        """The next `batch_size` records, in which dropped ones are not counted; it may span two epochs.

        Raises:
            BadRecord: one of them can't be trained on.
        """
        batch: list[Sample] = []
        counts = Counter({f"data/{x}/{what}": 0 for x in self.sources if x for what in OF_A_DATA_SET})
        wanted = self.config.batch_size
        while wanted:
            taken = self._order.take(wanted)
            for one, own in zip(taken, self._samples(taken), strict=True):
                learned = self._whole.get(one)
                if learned is None:
                    kept = self._fitting(one, own)
                    learned = self._note(one, own, kept, counts)
                else:
                    kept = own
                if label := one[0]:
                    counts[f"data/{label}/records"] += 1
                    counts[f"data/{label}/learned_tokens"] += learned
                batch += kept
                wanted -= bool(kept)
            self._fates["taken"] += len(taken)
            if counts["dropped_records"] > DROPPED_AT_MOST and not batch:
                unreadable = counts["unreadable_records"]
                how = f"{unreadable} as unreadable, and the others" if unreadable else "all of them"
                raise BadRecord(
                    f"the last {counts['dropped_records']} records were dropped: {how} as longer than "
                    f"--seq-len {self.row_length} (data.too_long); raise --seq-len, and see logs/trainer.log"
                )
        found = {name: count for name, count in sorted(counts.items()) if count or name.startswith("data/")}
        metrics = {**self._order.epochs(), **found}
        return Batch(batch, metrics, sampling=FROM_TEXT)

    def log_fates(self) -> None:
        """Log what became of the records that this process has taken."""
        fates = ", ".join(f"{count} {what}" for what, count in sorted(self._fates.items()) if what != "taken")
        if fates:
            logger.info("of the %d records taken since this process began: %s", self._fates["taken"], fates)

    def _samples(self, taken: Sequence[Taken]) -> list[list[Sample]]:
        new: dict[Taken, list[Sample]] = {}
        for label, source in self.sources.items():
            own = dict.fromkeys(number for whose, number in taken if whose == label)
            numbers = [number for number in own if (label, number) not in self._encoded]
            if not numbers:
                continue
            encoded = self._encode(label, source, numbers)
            new |= zip([(label, n) for n in numbers], encoded, strict=True)
        samples = [self._encoded[one] if one in self._encoded else new[one] for one in taken]
        for one, made in new.items():
            length = sum(len(sample.token_ids) for sample in made)
            if self.sources[one[0]].repeats and length <= self._room:
                self._room -= length
                self._encoded[one] = made
        return samples

    def _encode(self, label: str, source: RecordSource, numbers: list[int]) -> list[list[Sample]]:
        """The samples of records; none of one that is left out since it can't be trained on.

        Raises:
            RecordRefused: one can't be trained on, and that is to end the run.
        """

        def make(own: Sequence[int]) -> EncodedRecords:
            records = source.read(own)
            try:
                return EncodedRecords(self._encoder.turns(records, own, source.where), {})
            except RecordRefused:
                if self.config.unreadable == "error":
                    raise
            found: list[list[Sample]] = []
            refused: dict[int, str] = {}
            for record, number in zip(records, own, strict=True):
                try:
                    found += self._encoder.turns([record], [number], source.where)
                except RecordRefused as error:
                    refused[number] = error.why
                    found.append([])
            return EncodedRecords(found, refused)

        samples, refused = self._shares.make(numbers, make)
        self._refused |= {(label, number): why for number, why in refused.items()}
        return samples

    def _fitting(self, one: Taken, samples: list[Sample]) -> list[Sample]:
        """The samples of a record that are trained on.

        Raises:
            BadRecord: one is too long, and that is to end the run.
        """
        if self.config.too_long == "cut" or self.row_length is None:
            return samples
        fitting = [sample for sample in samples if len(sample.token_ids) <= (self.row_length or 0)]
        if len(fitting) < len(samples) and self.config.too_long == "error":
            longest = max(len(sample.token_ids) for sample in samples)
            raise RecordRefused(
                self._order.where(one),
                f"it has {longest} tokens, more than --seq-len {self.row_length}; raise that, or let such "
                "records be cut or dropped (--data.too-long)",
            )
        return fitting

    def _note(self, one: Taken, samples: list[Sample], kept: list[Sample], counts: Counter[str]) -> int:
        """Count a record that is not learned as it is, and name the first of each kind; returns the number of
        its learned tokens."""
        if not samples:
            counts["dropped_records"] += 1
            counts["unreadable_records"] += 1
            self._log_fate("dropped as unreadable", one, f"dropped: {self._refused[one]}")
            return 0
        learned = sum(int(sample.loss_mask[1 : self.row_length].sum()) for sample in kept)
        cut = sum(len(sample.token_ids) > (self.row_length or len(sample.token_ids)) for sample in kept)
        unlearned = [sample for sample in kept if not self._teaches(sample)]
        cut_off = sum(bool(sample.loss_mask[1:].any()) for sample in unlearned)
        counts["dropped_records"] += not kept
        counts["dropped_samples"] += len(samples) - len(kept) if kept else 0
        counts["records_by_turn"] += len(samples) > 1
        counts["unlearned/cut_away"] += cut_off
        counts["unlearned/no_turn"] += len(unlearned) - cut_off
        if len(samples) == len(kept) == 1 and not cut and not unlearned:
            if one in self._encoded:
                self._whole[one] = learned
            return learned
        longest = max(len(sample.token_ids) for sample in samples)
        too_long = f"it has {longest} tokens, more than --seq-len {self.row_length}"
        if not kept:
            self._log_fate("dropped as too long", one, f"dropped: {too_long}")
        if 0 < len(kept) < len(samples):
            self._log_fate("dropped in part", one, f"dropped in part: {too_long}")
        if cut:
            self._log_fate("cut", one, f"cut: {too_long}")
        if len(samples) > 1:
            why = "the chat template renders earlier turns differently once others follow"
            self._log_fate("learned turn by turn", one, f"it becomes {len(samples)} samples: {why}")
        if len(unlearned) == len(kept) > 0:
            why = self._why_not(one, samples) if self._fates["with nothing to learn"] < WARNINGS else ""
            self._log_fate("with nothing to learn", one, f"nothing is learned: {why}")
        return learned

    def _log_fate(self, fate: str, one: Taken, sentence: str) -> None:
        """Count a record with this fate, and name it in the log if it is one of the first."""
        self._fates[fate] += 1
        if self._fates[fate] <= WARNINGS:  # to name it means to look for its line in the file
            logger.warning("%s: %s", self._order.where(one), sentence)

    def _teaches(self, sample: Sample) -> bool:
        """Whether any token of the sample is learned, after cutting; nothing predicts the first token."""
        return bool(sample.loss_mask[1 : self.row_length].any())

    def _why_not(self, one: Taken, samples: list[Sample]) -> str:
        """Why nothing is learned of a record."""
        if not samples:
            return self._refused[one]
        sample = samples[0]
        if sample.loss_mask[1:].any():
            first = int(sample.loss_mask.argmax())
            return (
                f"{first} tokens come before the first that is learned, and --seq-len {self.row_length} "
                "cuts the record before that"
            )
        (record,) = self.sources[one[0]].read([one[1]])
        turns = turns_of(record, self.config.learn)
        if turns is None:
            return "its completion is empty, and the tokenizer has no end-of-text token"
        roles = ", ".join(dict.fromkeys(message["role"] for message in turns.messages)) or "none"
        if self.config.learn != ["assistant"]:
            return f"it has no turn to learn (roles: {roles}; --data.learn {','.join(self.config.learn)})"
        return (
            f"it has no turn of the assistant (roles: {roles}), and only those are learned; the role must be "
            'written "assistant"'
        )
