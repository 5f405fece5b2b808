"""Settings of the model."""

from pydantic import Field

from cairn.config.base import BaseConfig


class ModelConfig(BaseConfig):
    """Model and tokenizer."""

    name: str = ""
    """Hugging Face directory, checkpoint (a step_N folder or its model/), or name on the hub (owner/name)."""
    init_seed: int | None = Field(default=None, ge=0)
    """Seed for random weights, if the directory has a config and a tokenizer but no weights."""
