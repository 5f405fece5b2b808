"""Records to tokens, and which of these are learned: conversations with a chat template, and plain texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord
from cairn.trainer.data.records import problem_of


def encode(
    records: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    indices: Sequence[int],
    *,
    where: Callable[[int], str] = "record {}".format,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Tokens of each record, and which of them are learned: what the assistant says.

    A record has `messages`, or `prompt` and `completion`. These are lists of messages, of which the
    completion's are learned, or plain texts, which are joined and closed with the end-of-text token.
    All are rendered and tokenised together, since that takes a fraction of the time.

    Args:
        records: at least one.
        tokenizer: with a chat template, if there are messages.
        indices: the records' places in the data set.
        where: names a record by its place, for messages.
        template_arguments: what the chat template gets beside the messages.

    Raises:
        BadRecord: one has neither, or its learned tokens can't be told from the others.
    """
    texts: dict[int, tuple[str, str]] = {}
    conversations: dict[int, _Conversation] = {}
    for place, (record, index) in enumerate(zip(records, indices, strict=True)):
        if problem := problem_of(record):
            raise BadRecord(f"{where(index)}: {problem}")
        if record.get("messages"):
            conversations[place] = _Conversation(index, record["messages"], 0)
        elif isinstance(prompt := record["prompt"], str):
            texts[place] = (prompt, record["completion"])
        else:
            conversations[place] = _Conversation(index, [*prompt, *record["completion"]], len(prompt))
    renderer = _Renderer(tokenizer, where, template_arguments or {})
    names = [indices[place] for place in texts]
    samples = zip(texts, _encode_texts(list(texts.values()), names, tokenizer, where), strict=True)
    talks = zip(conversations, _encode_conversations(list(conversations.values()), renderer), strict=True)
    return [sample for _, sample in sorted([*samples, *talks], key=lambda placed: placed[0])]


def _encode_texts(
    texts: list[tuple[str, str]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    where: Callable[[int], str],
) -> list[Sample]:
    """Prompt and completion are tokenised as the one text that they are.

    What is learned begins with the first token that holds something of the completion. One that holds the
    end of the prompt as well, such as a space before a word, is learned too. The text ends with one
    end-of-text token, whether the tokenizer appends it, the completion has it, or neither.
    """
    if not texts:
        return []
    wholes = [prompt + completion for prompt, completion in texts]
    if tokenizer.is_fast:
        encoded = tokenizer(wholes, return_offsets_mapping=True)
        tokens = encoded["input_ids"]
        starts = [
            _first_behind(offsets, len(prompt))
            for (prompt, _), offsets in zip(texts, encoded["offset_mapping"], strict=True)
        ]
    else:
        tokens = tokenizer(wholes)["input_ids"]
        starts = []
        for i, (before, after) in enumerate(
            zip(tokenizer([prompt for prompt, _ in texts])["input_ids"], tokens, strict=True)
        ):
            if before and before[-1] == tokenizer.eos_token_id:
                del before[-1]
            if after[: len(before)] != before:
                raise BadRecord(
                    f"{where(indices[i])}: the tokenizer ({type(tokenizer).__name__}) does not say where its "
                    "tokens stand, and makes others of the prompt alone than of prompt and completion, so "
                    "what is learned can't be told; use a fast tokenizer, or messages"
                )
            starts.append(len(before))
    samples = []
    eos = tokenizer.eos_token_id
    for ids, start in zip(tokens, starts, strict=True):
        last = len(ids)
        while eos is not None and last > start and ids[last - 1] == eos:
            last -= 1
        whole = [*ids[:last], *([] if eos is None else [eos])]
        samples.append(_sample(whole, [(start, len(whole))]))
    return samples


def _first_behind(offsets: Sequence[tuple[int, int]], length: int) -> int:
    """The first token that holds a character from place `length` on; else the first that stands for nothing
    behind the last that stands for something."""
    for i, (start, end) in enumerate(offsets):
        if end > max(start, length):
            return i
    return max((i + 1 for i, (start, end) in enumerate(offsets) if end > start), default=0)


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


class _Renderer:
    """Turns conversations into tokens with the tokenizer's chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, where: Callable[[int], str], arguments: Mapping[str, Any]
    ):
        self.tokenizer = tokenizer
        self.where = where
        self.arguments = arguments

    def render(
        self, conversations: list[tuple[int, list[dict[str, Any]]]], *, asking: bool
    ) -> list[list[int]]:
        """Tokens of each record's messages, all at once; an empty conversation has none.

        Raises:
            BadRecord: the template refuses one.
        """
        filled = [messages for _, messages in conversations if messages]
        try:
            rendered = iter(self._tokens(filled, asking=asking) if filled else [])
        except Exception as error:  # whatever a template raises, which says nothing of the record
            for index, messages in conversations:
                try:
                    self._tokens([messages] if messages else [], asking=asking)
                except Exception as cause:
                    what = f"{self.where(index)}: the chat template refuses it: {cause}"
                    raise BadRecord(what) from None
            raise BadRecord(f"the chat template fails: {error}") from None
        return [next(rendered) if messages else [] for _, messages in conversations]

    def _tokens(self, conversations: list[list[dict[str, Any]]], *, asking: bool) -> list[list[int]]:
        if not conversations:
            return []
        rendered: Any = self.tokenizer.apply_chat_template(
            conversations, add_generation_prompt=asking, tokenize=True, return_dict=True, **self.arguments
        )
        return rendered["input_ids"]


def _encode_conversations(conversations: list[_Conversation], renderer: _Renderer) -> list[Sample]:
    """What is learned of a turn is what comes after the prompt that asks for it."""
    if conversations and renderer.tokenizer.chat_template is None:
        raise BadRecord(
            f"{renderer.where(conversations[0].index)}: it has messages, and the tokenizer has no chat "
            "template to render them"
        )
    turns = [(talk, i) for talk in conversations for i in talk.learned]
    wholes = renderer.render([(talk.index, talk.messages) for talk in conversations], asking=False)
    prompts = iter(renderer.render([(talk.index, talk.messages[:i]) for talk, i in turns], asking=True))
    within = [(talk.index, talk.messages[: i + 1]) for talk, i in turns if i + 1 < len(talk.messages)]
    ends = iter(renderer.render(within, asking=False))
    samples = []
    for talk, tokens in zip(conversations, wholes, strict=True):
        learned = []
        for i in talk.learned:
            before, after = next(prompts), next(ends) if i + 1 < len(talk.messages) else tokens
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                raise BadRecord(f"{renderer.where(talk.index)}: {_why_unclear(talk, i)}")
            learned.append((len(before), len(after)))
        samples.append(_sample(tokens, learned))
    return samples


def _why_unclear(talk: _Conversation, i: int) -> str:
    """Why the tokens of turn `i` can't be told from the others, and what to do about it."""
    if len(talk.messages) == i + 1 and len(talk.learned) == 1:
        return (
            f"the chat template opens message {i} otherwise when it asks for it (add_generation_prompt) than "
            "when it renders it, so its tokens can't be told; mend the template, or give prompt and "
            "completion as text"
        )
    return (
        f"the chat template renders message {i} differently at the end of a conversation than within it, so "
        "its tokens can't be told; split it into single turns"
    )


def _sample(tokens: list[int], learned: list[tuple[int, int]]) -> Sample:
    mask = np.zeros(len(tokens), np.bool_)
    for start, end in learned:
        mask[start:end] = True
    return Sample(np.array(tokens, np.int32), mask)
