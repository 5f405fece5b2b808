"""Stop strings: which token of an answer completes one, and what of the answer is shown.

An answer ends with the token that completes a stop string. All of its tokens are learned as they were sampled
and stay in the conversation; whoever reads the answer's text reads it up to where the stop string begins.

A server looks for stop strings in one piece of an answer at a time. So what counts is found here, in the
tokens of the whole answer as they come back, whatever pieces they come in; that the server looks as well only
saves it the tokens that would come behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers.decoders import DecodeStream

from cairn.orchestrator.completion.chat import ChatFormat
from cairn.policy.generation import Generation, VersionSpan
from cairn.run.errors import UsageError

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
    return Generation(generation.token_ids[:count], generation.logprobs[:count], spans, "stop")


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
