"""Records to samples, in a seeded order that does not depend on the number of ranks."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.config.trainer import DATA_FILES, SFTDataConfig
from cairn.run.batches import Batch, Sample
from cairn.run.seeds import permutation


class BadRecord(Exception):
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

    def identity(self) -> dict[str, Any]:
        """What tells this data set from another: a position in one means nothing in the other."""
        first = json.dumps(self.records[0], sort_keys=True, default=str)
        last = json.dumps(self.records[-1], sort_keys=True, default=str)
        digest = hashlib.blake2b(f"{first}\n{last}".encode(), digest_size=8).hexdigest()
        return {"records": len(self.records), "first_and_last": digest}

    def check_identity(self, saved: dict[str, Any] | None) -> None:
        """Refuse to go on in another data set than the checkpoint's.

        Raises:
            BadRecord: naming both.
        """
        if saved is not None and saved != self.identity():
            raise BadRecord(
                f"{self.config.name} is not the checkpoint's data set: that has {saved['records']} records, "
                f"this has {len(self.records)}, or they begin or end otherwise; start a new run from the "
                "checkpoint's weights with --model.name"
            )

    def next_batch(self, step: int) -> Batch:
        """The next `batch_size` records; a batch may span two epochs."""
        indices = [self._index(self.position + i) for i in range(self.config.batch_size)]
        self.position += len(indices)
        samples = [encode(self.records[index], self.tokenizer, index) for index in indices]
        return Batch(samples, {"epoch": self.position / len(self.records)})

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


def encode(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, index: int) -> Sample:
    """Tokens of one record, and which of them are learned: what the assistant says.

    A record has `messages`, or `prompt` and `completion`. These are lists of messages, of which the
    completion's are learned, or plain texts, which are joined and closed with the end-of-text token.

    Raises:
        BadRecord: it has neither, or the chat template does not render turn by turn.
    """
    if record.get("messages"):
        return _encode_messages(record["messages"], 0, tokenizer, index)
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None or completion is None:
        raise BadRecord(
            f"record {index} has the fields {sorted(record)}; it needs messages, or prompt and completion"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        before = tokenizer(prompt)["input_ids"]
        after = tokenizer(completion, add_special_tokens=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            after = [*after, tokenizer.eos_token_id]
        return _sample(before + after, [(len(before), len(before) + len(after))])
    return _encode_messages([*prompt, *completion], len(prompt), tokenizer, index)


def _encode_messages(
    messages: list[dict[str, Any]], first: int, tokenizer: PreTrainedTokenizerBase, index: int
) -> Sample:
    """Learn each assistant turn from message `first` on: what comes after the prompt that asks for it."""
    if tokenizer.chat_template is None:
        raise BadRecord(f"record {index} has messages, and the tokenizer has no chat template to render them")

    def render(count: int, asking: bool) -> list[int]:
        if count == 0:
            return []
        return tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=asking, tokenize=True, return_dict=True
        )["input_ids"]

    tokens = render(len(messages), False)
    learned = []
    for i, message in enumerate(messages):
        if i >= first and message["role"] == "assistant":
            before, after = render(i, True), render(i + 1, False)
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                raise BadRecord(
                    f"record {index}: the chat template renders message {i} differently at the end of a "
                    "conversation than within it, so its tokens can't be told; split it into single turns"
                )
            learned.append((len(before), len(after)))
    return _sample(tokens, learned)


def _sample(tokens: list[int], learned: list[tuple[int, int]]) -> Sample:
    mask = np.zeros(len(tokens), np.bool_)
    for start, end in learned:
        mask[start:end] = True
    return Sample(np.array(tokens, np.int32), mask)
