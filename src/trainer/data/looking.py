"""What a tokenizer, its chat template and the length of rows make of records, before anything is started."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from cairn.config.data import RecordsConfig, SFTDataConfig
from cairn.config.preferences import PreferenceDataConfig
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.run.files import read_json
from cairn.run.seeds import derive
from cairn.trainer.data.preference_forms import Form
from cairn.trainer.data.records import turns_of
from cairn.trainer.data.rendering import Encoder, RecordRefused
from cairn.trainer.data.sources import Indexed, RecordSource, Use

LEARNED_POSITIONS: Mapping[str, int] = {
    "biogpt": 1024,
    "codegen": 2048,
    "ctrl": 256,
    "gpt2": 1024,
    "gpt_bigcode": 1024,
    "gpt_neo": 2048,
    "gptj": 2048,
    "openai-gpt": 512,
    "opt": 2048,
    "xglm": 2048,
}
"""Model types that look positions up in a table, which ends, and the table's length unless they say it."""
NAMES = ("n_positions", "max_position_embeddings")


@dataclass(frozen=True)
class Limits:
    """rows: of the embeddings, padding included. positions: that are learned. None: unknown, or no limit."""

    rows: int | None
    positions: int | None


def limits_of(folder: Path) -> Limits:
    """The limits of the model in a Hugging Face directory.

    Raises:
        DamagedFile: its config.json is damaged.
    """
    about = read_json(folder / "config.json", dict[str, Any]) or {}
    text = about.get("text_config")
    inner = cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else about
    rows = _number(inner.get("vocab_size")) or _number(about.get("vocab_size"))
    kind = str(inner.get("model_type"))
    if kind not in LEARNED_POSITIONS:
        return Limits(rows, None)
    said = next((number for name in NAMES if (number := _number(inner.get(name)))), None)
    return Limits(rows, said or LEARNED_POSITIONS[kind])


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


ENCODED = 512
"""So many records of each data set are drawn, rendered and tokenised."""
LOOKED_AT = 20_000
"""Of so many, what kinds of messages they have is compared with what the template shows."""
AT_ONCE = 64
TEACHING = 0.05
"""A run is refused if fewer of the records teach anything."""
WORTH_SAYING = 0.5
"""Of that share of the records, it is a warning if they teach nothing or can't be trained on."""
BLANK = 4
"""Tokens at the end of a turn among which the one is looked for that ends it: line ends may follow."""


@dataclass
class _Seen:
    """What was found in the records of a data set.

    schemaless: records that call tools, and have no schemas of them. turns: that are learned. beginning: of
    these, those that begin with a line end. endless: those without a token that ends an answer; last: the
    tokens that they end with, by how often.
    """

    records: int = 0
    too_long: int = 0
    teaching: int = 0
    tokens: int = 0
    learned: int = 0
    schemaless: int = 0
    turns: int = 0
    beginning: int = 0
    endless: int = 0
    last: Counter[int] = field(default_factory=Counter[int])


class Looking:
    """Looks at the records of one data set."""

    def __init__(
        self,
        settings: SFTDataConfig | PreferenceDataConfig,
        use: Use,
        tokenizer: PreTrainedTokenizerBase,
        *,
        row_length: int,
        limits: Limits,
        ends: Mapping[int, Any] | None,
    ):
        """Args:
        use: what the records are read for.
        row_length: tokens after which a sample is cut.
        limits: of the model.
        ends: ids of the tokens that end an answer; None: it answers nothing.
        """
        self.settings, self.use, self.tokenizer = settings, use, tokenizer
        self.row_length, self.ends = row_length, ends
        learn = settings.learn if isinstance(settings, SFTDataConfig) else ["assistant"]
        self._encoder = Encoder(tokenizer, roles=learn, ignored=settings.ignore, rows=limits.rows)

    def look(self, source: RecordSource, seed: int) -> Iterator[str]:
        """Notices about a data set.

        Raises:
            UsageError: it can't be trained on.
        """
        seen, name = _Seen(), source.config.name
        for count, take in ((LOOKED_AT, self._check), (ENCODED, self._encode)):
            numbers, there = _drawn(source, count, seed)
            refused: list[str] = []
            for start in range(0, len(numbers), AT_ONCE):
                some = numbers[start : start + AT_ONCE]
                for number, record in zip(some, source.read(some), strict=True):
                    try:
                        take(self._answers(record, number, source), number, source, seen)
                    except RecordRefused as error:
                        refused.append(str(error))
            if refused:
                yield from self._of_refused(refused, name, len(numbers), there)
        yield from self._in_words(seen, name, there)

    def _answers(
        self, record: Mapping[str, Any], number: int, source: RecordSource
    ) -> Sequence[Mapping[str, Any]]:
        """The records that one is learned as.

        Raises:
            RecordRefused: it can't be learned from.
        """
        if not isinstance(self.use, Form):
            return [record]
        if problem := self.use.problem_of(record):
            raise RecordRefused(source.where(number), problem)
        return self.use.answers(record)

    def _check(
        self, answers: Sequence[Mapping[str, Any]], number: int, source: RecordSource, seen: _Seen
    ) -> None:
        for answer in answers:
            self._encoder.check(answer, number, source.where)

    def _encode(
        self, answers: Sequence[Mapping[str, Any]], number: int, source: RecordSource, seen: _Seen
    ) -> None:
        samples = [self._encoder.turns([answer], [number], source.where)[0] for answer in answers]
        seen.records += 1
        seen.too_long += any(len(one.token_ids) > self.row_length for own in samples for one in own)
        seen.teaching += all(any(self._teaches(one) for one in own) for own in samples)
        for answer, own in zip(answers, samples, strict=True):
            for sample in own:
                seen.tokens += min(len(sample.token_ids), self.row_length)
                seen.learned += int(sample.loss_mask[1 : self.row_length].sum())
            turns = turns_of(answer, self._encoder.roles)
            if turns is None:
                continue
            calls = any(message.get("tool_calls") for message in turns.messages)
            seen.schemaless += calls and not turns.tools and answer is answers[0]
            learned = [turns.messages[i] for i in turns.learned]
            seen.turns += len(learned)
            seen.beginning += sum(str(one.get("content", "")).startswith(("\n", "\r")) for one in learned)
            for sample in own if self.ends is not None else []:
                self._look_at_ends(sample, self.ends or {}, seen)

    def _teaches(self, sample: Sample) -> bool:
        return bool(sample.loss_mask[1 : self.row_length].any())

    def _look_at_ends(self, sample: Sample, ends: Mapping[int, Any], seen: _Seen) -> None:
        """Count the turns of a sample that end with no token that ends an answer."""
        mask = [*sample.loss_mask.tolist(), False]
        tokens = sample.token_ids.tolist()
        for end in range(1, len(mask)):
            if mask[end - 1] and not mask[end]:
                last = tokens[max(end - BLANK, 0) : end]
                if not ends.keys() & set(last):
                    seen.endless += 1
                    shown = [token for token in last if str(self.tokenizer.decode([token])).strip()]
                    seen.last[(shown or last)[-1]] += 1

    def _of_refused(self, refused: list[str], name: str, count: int, there: str) -> Iterator[str]:
        """What is said of records that can't be trained on.

        Raises:
            UsageError: they end the run, or are most of the data.
        """
        share = f"{len(refused):,} of {count:,} records looked at{there}"
        if self.settings.unreadable == "error" or len(refused) >= WORTH_SAYING * count:
            how = f"; {share} can't be trained on" if len(refused) > 1 else ""
            if self.settings.unreadable == "error" and len(refused) < WORTH_SAYING * count:
                how += "; --data.unreadable drop leaves such records out"
            raise UsageError(f"{self.settings.setting} {refused[0]}{how}")
        yield f"{name}: {share} can't be trained on and are left out, such as {refused[0]}"

    def _in_words(self, seen: _Seen, name: str, there: str) -> Iterator[str]:
        count = seen.records
        if not count:
            return
        parts = [f"{_share(seen.learned, seen.tokens)} of their tokens are learned"]
        if seen.too_long:
            fate = {"cut": "are cut", "drop": "are dropped", "error": "end the run"}[self.settings.too_long]
            too_long = _share(seen.too_long, count)
            parts.append(f"{too_long} are longer than --seq-len {self.row_length} and {fate}")
        if seen.beginning:
            parts.append(f"{_share(seen.beginning, seen.turns)} of the answers begin with a line end")
        if seen.schemaless:
            parts.append(f"{_share(seen.schemaless, count)} call tools without showing their schemas (tools)")
        if seen.teaching < count:
            parts.append(f"{_share(count - seen.teaching, count)} teach nothing")
        words = f"{name}: of {count:,} records looked at{there}, " + "; ".join(parts)
        if seen.teaching < TEACHING * count:
            raise UsageError(
                f"{words}. Next to nothing would be learned: see whether --seq-len {self.row_length} is too "
                "short for the prompts, or no turn has a role that is learned (data.learn)"
            )
        yield f"warning: {words}" if count - seen.teaching >= WORTH_SAYING * count else words
        if self.ends is not None and seen.endless > WORTH_SAYING * seen.turns:
            yield self._of_ends(seen, self.ends)

    def _of_ends(self, seen: _Seen, ends: Mapping[int, Any]) -> str:
        """That turns end with a token behind which a server goes on."""
        (token, _), *_ = seen.last.most_common(1)
        known = ", ".join(f"{self.tokenizer.convert_ids_to_tokens(one)!r} ({one})" for one in ends)
        ids = [*ends, token]
        return (
            f"warning: the turns that are learned end with {self.tokenizer.convert_ids_to_tokens(token)!r} "
            f"({token}), which ends no answer: a server goes on behind it. What ends an answer "
            f'is {known or "no token"}. Put "eos_token_id": {ids} into generation_config.json of the model'
        )


def _share(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.0f} %" if share >= 1 or not part else f"{share:.1g} %"


def _drawn(source: RecordSource, count: int, seed: int) -> tuple[list[int], str]:
    """Numbers of so many of a data set's records, and of how many they are drawn; of a stream, the first."""
    if not isinstance(source, Indexed):
        return source.first(min(count, ENCODED)), " at its beginning"
    if len(source) <= count:
        return list(range(0, len(source), source.units)), ""
    draw = random.Random(derive(seed, "records looked at"))
    numbers = draw.sample(range(len(source) // source.units), count // source.units)
    return sorted(number * source.units for number in numbers), f" (of {len(source) // source.units:,})"


def look_at_data(
    sources: Iterable[RecordSource],
    settings: RecordsConfig,
    use: Use,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    row_length: int,
    limits: Limits,
    ends: Mapping[int, Any] | None,
) -> Iterator[str]:
    """Notices about the data sets of a run.

    Args:
        sources: the data sets, opened.
        use: what the records are read for.

    Raises:
        UsageError: they can't be trained on.
    """
    known = cast("SFTDataConfig | PreferenceDataConfig", settings)
    for source in sources:
        looking = Looking(known, use, tokenizer, row_length=row_length, limits=limits, ends=ends)
        yield from looking.look(source, seed)
