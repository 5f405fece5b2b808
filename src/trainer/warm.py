"""What a spare does ahead of time, so that it can take a rank's place at once."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import cairn.trainer.loop  # noqa: F401
from cairn.config.trainer import TrainerBase
from cairn.trainer.tasks import task_class


def warm_up(config: TrainerBase) -> None:
    """Import all that training imports, also what it imports late; no memory is taken for weights."""
    folder = Path(config.model.name)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    task_class(config).warm_up(folder)
