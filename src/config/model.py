"""Which model a role works on."""

from pydantic import Field

from cairn.config.base import BaseConfig


class ModelConfig(BaseConfig):
    """Model and tokenizer."""

    name: str = ""
    """A Hugging Face directory, a checkpoint's step_N (or its model/), or a hub name."""
    init_seed: int | None = Field(default=None, ge=0)
    """Seed for random weights where the directory holds a config and a tokenizer but no weights."""
