"""The chat format of a model: renders conversations to tokens, and decodes answers to text."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from cairn.policy.generation import Generation, VersionSpan
from cairn.run.conversations import Message, NoPrompt, end_tokens, for_template, is_plain
from cairn.run.errors import UsageError
from cairn.run.output import importing, quoted
from cairn.run.records.numbers import has_written_numbers, show_as_written

SURROGATE = re.compile("[\ud800-\udfff]")


class ChatFormat:
    """A model's tokenizer, chat template and end tokens.

    Args:
        model: Hugging Face directory with the tokenizer.
        template_arguments: further variables for the chat template.
    """

    def __init__(self, model: Path, template_arguments: Mapping[str, Any] | None = None):
        with importing():
            from transformers import AutoTokenizer  # takes seconds, and commands that only check need none

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.stop_token_ids = tuple(end_tokens(model, self.tokenizer.eos_token_id))
        """Token ids that end an answer; see `end_tokens`."""
        self._template_arguments = dict(template_arguments or {})

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> list[int]:
        """The tokens of the conversation, up to where the model's turn begins (the generation prompt).

        Args:
            tools: JSON schemas of the functions that the model may call.

        Raises:
            NoPrompt: the template fails on the messages, or renders nothing.
        """
        prompt_ids = self._apply(messages, tools, tokenize=True, return_dict=True)["input_ids"]
        if not prompt_ids:
            raise NoPrompt("the chat template renders its messages to nothing")
        return prompt_ids

    def rendering(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The text whose tokens `prompt` returns.

        Raises:
            NoPrompt: the template fails on the messages.
        """
        return self._apply(messages, tools, tokenize=False)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message] | None, **how: bool) -> Any:
        def apply(value: tuple[Any, Any], **how: bool) -> Any:
            return self.tokenizer.apply_chat_template(
                value[0], tools=value[1], add_generation_prompt=True, **how, **self._template_arguments
            )

        try:
            shown = [message if is_plain(message) else for_template(message) for message in messages]
            value = (shown, list(tools) if tools else None)
            if not has_written_numbers(value):
                return apply(value, **how)
            (text,) = show_as_written(lambda value: [apply(value, tokenize=False)], value)
            return self.tokenizer(text, add_special_tokens=False) if how["tokenize"] else text
        except Exception as error:  # whatever a template makes of its messages
            raise NoPrompt(
                unreadable(messages) or f"the chat template fails on its messages: {quoted(error)}"
            ) from error

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer's text, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def full_text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def tokens_in_place(self, text: str, after: int | None) -> list[int] | None:
        """The tokens of a piece of a longer text, if they are certain without the text before it.

        A tokenizer splits a text at its added tokens (special tokens are among them) before anything else. So
        the tokens from an added token onward do not depend on the text before it.

        Args:
            after: the token right before the piece; None if the piece begins with an added token itself.

        Returns:
            None if neither the token before the piece nor its first token is an added one.
        """
        before = "" if after is None else self.added_tokens.get(after)
        if before is None:
            return None
        token_ids = self.tokenizer(before + text, add_special_tokens=False)["input_ids"]
        if after is not None:
            return token_ids[1:] if token_ids and token_ids[0] == after else None
        first = self.added_tokens.get(token_ids[0]) if token_ids else None
        return token_ids if first is not None and text.startswith(first) else None

    @functools.cached_property
    def added_tokens(self) -> dict[int, str]:
        """The texts of the added tokens at which the tokenizer splits every text."""
        known = self.tokenizer.added_tokens_decoder.items()
        return {token_id: token.content for token_id, token in known if not token.single_word}


def unreadable(messages: Sequence[Message]) -> str | None:
    """Which character of the messages no tokenizer takes, in words; None if there is none."""
    for number, message in enumerate(messages):
        try:
            text = json.dumps(message, ensure_ascii=False, default=str)
        except (RecursionError, ValueError):
            continue
        if found := SURROGATE.search(text):
            return (
                f"message {number} (role {message.get('role')!r}) has the character U+{ord(found[0]):04X}, "
                'half of a surrogate pair, which no tokenizer takes: decode the text with errors="replace", '
                "or leave the character out"
            )
    return None


# Stop strings: which token of an answer completes one, and what of the answer is shown.


INVALID_PREFIX = "Invalid prefix encountered"
"""How the error of a decoder begins that was given bytes that are no text, after which it is made anew."""


@dataclass(frozen=True)
class Stopped:
    """Where a stop string has ended an answer.

    string: the one. tokens: number of the answer's tokens, up to the one that completes it. hidden: number of
    characters at the end of their text, in which special tokens are written, that are not shown: the stop
    string, and what its last token has behind it.
    """

    string: str
    tokens: int
    hidden: int


class StopWatch:
    """Looks for stop strings in the tokens of one answer, which are given in pieces of any length.

    What it finds depends on the tokens alone: the first stop string that is complete; of those that end at
    the same character, the longest.

    Raises:
        UsageError: the tokenizer has no `tokenizer.json`, so nothing says what text each token adds.
    """

    def __init__(self, chat: ChatFormat, strings: Sequence[str]):
        self.stopped: Stopped | None = None
        self.strings = tuple(strings)
        self._tokens = 0
        self._text = ""
        """The end of the text so far, long enough for a stop string that has begun."""
        self._longest = max(map(len, strings), default=0)
        self._tokenizer: Any = chat.tokenizer
        if self.strings and not self._tokenizer.is_fast:
            raise UsageError(
                f"stop strings {list(self.strings)} need a tokenizer with a tokenizer.json, and the model's "
                "is of the kind without one; end answers with stop_token_ids"
            )
        self._stream = DecodeStream(skip_special_tokens=False)

    def feed(self, token_ids: Sequence[int]) -> Stopped | None:
        """Look at the answer's next tokens; returns where the answer ends, if a stop string is complete."""
        if not self.strings:
            return None
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self._tokens += 1
            new = self._step(int(token_id))
            if not new:
                continue
            before = len(self._text)
            self._text += new
            found = [
                (end, -len(one), one)
                for one in self.strings
                if (end := self._text.find(one, max(before - len(one) + 1, 0)) + len(one)) >= len(one)
            ]
            if found:
                end, _, string = min(found)
                self.stopped = Stopped(string, self._tokens, len(self._text) - end + len(string))
            self._text = self._text[-self._longest :]
        return self.stopped

    def _step(self, token_id: int) -> str:
        tokenizer = self._tokenizer.backend_tokenizer
        try:
            return self._stream.step(tokenizer, token_id) or ""
        except (OverflowError, TypeError):  # no id of the tokenizer's
            return ""
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(tokenizer, token_id) or ""

    def cut(self, generation: Generation, asked: int) -> tuple[Generation, int]:
        """What of an answer's next tokens belongs to it, and how many of them there should have been.

        Args:
            asked: number of tokens requested.
        """
        if not self.strings:
            return generation, asked
        before = self._tokens
        stopped = self.feed(generation.token_ids)
        if stopped is not None:
            return cut_to(generation, stopped.tokens - before), asked
        if generation.stop is not None:  # the server has seen one in a text with the prompt's before it
            return replace(generation, finish_reason="length"), len(generation.token_ids)
        return generation, asked


def cut_to(generation: Generation, count: int) -> Generation:
    """The first `count` tokens of a generation, which a stop string ends."""
    spans = [
        VersionSpan(span.version, span.start, min(span.end, count))
        for span in generation.weight_versions
        if span.start < count
    ]
    experts = generation.experts  # of all tokens; whoever uses them looks how many there are
    return Generation(
        generation.token_ids[:count], generation.logprobs[:count], spans, "stop", experts=experts
    )


def stopped_at_its_end(
    chat: ChatFormat, strings: Sequence[str], token_ids: Sequence[int], finish_reason: str | None
) -> Stopped | None:
    """The stop string that has ended a whole answer; None if something else has."""
    if not strings or finish_reason != "stop":
        return None
    stopped = StopWatch(chat, strings).feed(token_ids)
    return stopped if stopped is not None and stopped.tokens == len(token_ids) else None


def shown_tokens(
    chat: ChatFormat, token_ids: Sequence[int], stopped: Stopped | None
) -> tuple[Sequence[int], str]:
    """What of an answer is shown: tokens that are shown in whole, and the text of a further one in part."""
    if stopped is None:
        return token_ids, ""
    text = chat.full_text(token_ids)
    keep = max(len(text) - stopped.hidden, 0)
    count, whole = len(token_ids), text
    while count and len(whole) > keep:
        count -= 1
        whole = chat.full_text(token_ids[:count])
    return token_ids[:count], text[len(whole) : keep]


def shown_text(chat: ChatFormat, token_ids: Sequence[int], stopped: Stopped | None) -> str:
    """The text of an answer that is shown, without special tokens."""
    whole, part = shown_tokens(chat, token_ids, stopped)
    return chat.text(whole) + part
