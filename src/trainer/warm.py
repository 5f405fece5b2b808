"""What a spare does ahead of time, so that it can take a rank's place at once."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import cairn.trainer.loop  # noqa: F401
from cairn.config.trainer import SFTConfig, TrainerConfig


def warm_up(config: SFTConfig | TrainerConfig) -> None:
    """Import all that training imports, also what it does late; no memory is taken for weights."""
    folder = Path(config.model.name)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if isinstance(config, SFTConfig):
        import datasets  # noqa: F401

        AutoTokenizer.from_pretrained(folder)
