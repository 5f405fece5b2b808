"""The chat format of a model: renders conversations to tokens, and decodes answers to text."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.run.conversations import Message, NoPrompt, end_tokens, for_template, is_plain
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
