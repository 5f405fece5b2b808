"""The chat format of a model: renders conversations to tokens, and decodes answers to text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig


class NoPrompt(ValueError):
    """The chat template renders no prompt from a conversation; the message says why."""


class ChatFormat:
    """A model's tokenizer, chat template and end tokens.

    Args:
        model: Hugging Face directory with the tokenizer.
        template_arguments: further variables for the chat template.
    """

    def __init__(self, model: Path, template_arguments: Mapping[str, Any] | None = None):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.stop_token_ids = _stop_tokens(model, self.tokenizer.eos_token_id)
        """Token ids that end an answer: the tokenizer's EOS token and those of `generation_config.json`."""
        self._template_arguments = dict(template_arguments or {})

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of the conversation, up to where the model's turn begins (the generation prompt).

        Raises:
            NoPrompt: the template fails on the messages, or renders nothing.
        """
        try:
            prompt_ids = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self._template_arguments,
            )["input_ids"]
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise NoPrompt(f"the chat template fails on its messages: {error}") from error
        if not prompt_ids:
            raise NoPrompt("the chat template renders its messages to nothing")
        return prompt_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer's text, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def _stop_tokens(folder: Path, eos_token_id: int | None) -> tuple[int, ...]:
    ids = {eos_token_id} if eos_token_id is not None else set()
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return tuple(sorted(ids))
