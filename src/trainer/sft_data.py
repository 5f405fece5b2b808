"""Records to samples, in a seeded order that does not depend on the number of ranks."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.config.trainer import DATA_FILES, SFTDataConfig
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.errors import CairnError
from cairn.run.seeds import permutation

CACHED_TOKENS = 1 << 24
"""Tokens of encoded records that are kept for later epochs; with their masks they take 80 MiB."""


class BadRecord(CairnError):
    """A record can't be trained on; the message says which and why."""


class SFTData:
    """Cuts an endless stream of epochs, each in its own seeded order, into batches.

    `position` counts the records taken so far: all that a resumed run needs to go on.
    """

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, position: int):
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.position = position
        self.records = load_records(config)
        self._epoch = -1
        self._order: list[int] = []
        self._encoded: dict[int, Sample] = {}
        self._room = CACHED_TOKENS

    def next_batch(self, step: int) -> Batch:
        """The next `batch_size` records; a batch may span two epochs."""
        indices = [self._index(self.position + i) for i in range(self.config.batch_size)]
        self.position += len(indices)
        new = self._encode([index for index in dict.fromkeys(indices) if index not in self._encoded])
        samples = [self._encoded.get(index) or new[index] for index in indices]
        for index, sample in new.items():
            if len(sample.token_ids) <= self._room:
                self._room -= len(sample.token_ids)
                self._encoded[index] = sample
        return Batch(samples, {"epoch": self.position / len(self.records)}, sampling=FROM_TEXT)

    def _encode(self, indices: list[int]) -> dict[int, Sample]:
        if not indices:
            return {}
        columns = self.records[indices]
        records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return dict(zip(indices, encode(records, self.tokenizer, indices), strict=True))

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.records))
        if not self.config.shuffle:
            return place
        if epoch != self._epoch:
            self._order = permutation(len(self.records), self.seed, "sft order", epoch)
            self._epoch = epoch
        return self._order[place]


def load_records(config: SFTDataConfig) -> Any:
    """The data set: a .jsonl, .json or .parquet file, a folder, or a name on the hub."""
    import datasets

    datasets.disable_progress_bars()
    path = Path(config.name)
    builder = DATA_FILES.get(path.suffix)
    if builder:
        records = datasets.load_dataset(builder, data_files=str(path), split="train")
    else:
        records = datasets.load_dataset(config.name, split=config.split)
    if not len(records):
        raise BadRecord(f"{config.name} holds no records")
    return records


def identity_of(records: Any) -> dict[str, Any]:
    """What tells this data set from another: a position in one means nothing in the other."""
    first = json.dumps(records[0], sort_keys=True, default=str)
    last = json.dumps(records[-1], sort_keys=True, default=str)
    digest = hashlib.blake2b(f"{first}\n{last}".encode(), digest_size=8).hexdigest()
    return {"records": len(records), "first_and_last": digest}


def check_identity(name: str, records: Any, saved: dict[str, Any] | None) -> None:
    """Refuse to go on in another data set than the checkpoint's, whose identity is `saved`.

    Raises:
        BadRecord: naming both.
    """
    if saved is not None and saved != identity_of(records):
        raise BadRecord(
            f"{name} is not the checkpoint's data set: that has {saved['records']} records, "
            f"this has {len(records)}, or they begin or end otherwise; start a new run from the "
            "checkpoint's weights with --model.name"
        )


def encode(
    records: list[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, indices: list[int]
) -> list[Sample]:
    """Tokens of each record, and which of them are learned: what the assistant says.

    A record has `messages`, or `prompt` and `completion`. These are lists of messages, of which the
    completion's are learned, or plain texts, which are joined and closed with the end-of-text token.
    All are rendered and tokenised together, since that takes a fraction of the time.

    Args:
        records: at least one.
        tokenizer: with a chat template, if there are messages.
        indices: the records' places in the data set.

    Raises:
        BadRecord: one has neither, or the chat template does not render turn by turn.
    """
    texts: dict[int, tuple[str, str]] = {}
    conversations: dict[int, _Conversation] = {}
    for place, (record, index) in enumerate(zip(records, indices, strict=True)):
        prompt, completion = record.get("prompt"), record.get("completion")
        if record.get("messages"):
            conversations[place] = _Conversation(index, record["messages"], 0)
        elif prompt is None or completion is None:
            raise BadRecord(
                f"record {index} has the fields {sorted(record)}; it needs messages, or prompt and completion"
            )
        elif isinstance(prompt, str) and isinstance(completion, str):
            texts[place] = (prompt, completion)
        else:
            conversations[place] = _Conversation(index, [*prompt, *completion], len(prompt))
    samples = zip(texts, _encode_texts(list(texts.values()), tokenizer), strict=True)
    talks = zip(conversations, _encode_conversations(list(conversations.values()), tokenizer), strict=True)
    return [sample for _, sample in sorted([*samples, *talks], key=lambda placed: placed[0])]


def _encode_texts(texts: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    if not texts:
        return []
    prompts, completions = map(list, zip(*texts, strict=True))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    befores = tokenizer(prompts)["input_ids"]
    afters = tokenizer(completions, add_special_tokens=False)["input_ids"]
    return [
        _sample([*before, *after, *end], [(len(before), len(before) + len(after) + len(end))])
        for before, after in zip(befores, afters, strict=True)
    ]


@dataclass(frozen=True)
class _Conversation:
    """Of record `index`: each assistant turn from message `first` on is learned."""

    index: int
    messages: list[dict[str, Any]]
    first: int

    @property
    def learned(self) -> list[int]:
        """The messages that are learned."""
        return [
            i for i, message in enumerate(self.messages) if i >= self.first and message["role"] == "assistant"
        ]


def _encode_conversations(
    conversations: list[_Conversation], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """What is learned of a turn is what comes after the prompt that asks for it."""
    if conversations and tokenizer.chat_template is None:
        raise BadRecord(
            f"record {conversations[0].index} has messages, and the tokenizer has no chat template to "
            "render them"
        )
    turns = [(talk, i) for talk in conversations for i in talk.learned]
    wholes = _render([talk.messages for talk in conversations], tokenizer, asking=False)
    prompts = iter(_render([talk.messages[:i] for talk, i in turns], tokenizer, asking=True))
    within = [talk.messages[: i + 1] for talk, i in turns if i + 1 < len(talk.messages)]
    ends = iter(_render(within, tokenizer, asking=False))
    samples = []
    for talk, tokens in zip(conversations, wholes, strict=True):
        learned = []
        for i in talk.learned:
            before, after = next(prompts), next(ends) if i + 1 < len(talk.messages) else tokens
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                raise BadRecord(
                    f"record {talk.index}: the chat template renders message {i} differently at the end of a "
                    "conversation than within it, so its tokens can't be told; split it into single turns"
                )
            learned.append((len(before), len(after)))
        samples.append(_sample(tokens, learned))
    return samples


def _render(
    conversations: list[list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase, *, asking: bool
) -> list[list[int]]:
    """Their tokens; an empty conversation has none."""
    filled = [messages for messages in conversations if messages]
    if not filled:
        return [[] for _ in conversations]
    rendered = iter(
        tokenizer.apply_chat_template(filled, add_generation_prompt=asking, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    )
    return [next(rendered) if messages else [] for messages in conversations]


def _sample(tokens: list[int], learned: list[tuple[int, int]]) -> Sample:
    mask = np.zeros(len(tokens), np.bool_)
    for start, end in learned:
        mask[start:end] = True
    return Sample(np.array(tokens, np.int32), mask)
