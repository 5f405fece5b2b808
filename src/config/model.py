"""Settings of the model."""

from pydantic import Field

from cairn.config.base import BaseConfig


class ModelConfig(BaseConfig):
    """Model and tokenizer."""

    name: str = ""
    """Hugging Face directory, step_N, other program's checkpoint, or name on the hub (owner/name)."""
    config: str | None = None
    """Folder with config.json and tokenizer, for another program's checkpoint that has none beside it."""
    init_seed: int | None = Field(default=None, ge=0)
    """Seed for random weights, if the directory has a config and a tokenizer but no weights."""
