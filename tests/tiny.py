"""Makes tiny models for tests, and finds the example's tokenizer."""

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

EXAMPLE = Path(__file__).parents[1] / "configs" / "reverse_text" / "model"
"""The example task's model: a configuration without weights, and a tokenizer of one token a character."""
VOCABULARY = 102
"""Tokens of that tokenizer."""


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write(model: PreTrainedModel, folder: Path) -> Path:
    """Write it with the example's tokenizer as a Hugging Face directory; returns the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    shutil.copyfile(EXAMPLE / "generation_config.json", folder / "generation_config.json")
    return folder


def write_adapter(base: Path, folder: Path, seed: int, about: "LoraConfig") -> "PeftModel":
    """Write a random adapter of a base as a step has it, with the record of the base; returns the two."""
    from peft import get_peft_model  # not in all programs that make a tiny model

    from cairn.checkpoint.checksums import FileChecksum
    from cairn.checkpoint.step_folder import BASE_RECORD
    from cairn.model.adapters import Base

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), about)
    model.save_pretrained(folder)
    files = {path.name: FileChecksum(path.stat().st_size) for path in base.glob("*.safetensors")}
    (folder / BASE_RECORD).write_bytes(Base.of("base", base, files).to_json())
    return model


def write_example(folder: Path, seed: int = 0, *, tied: bool = True) -> Path:
    """The example's Qwen3 of 0.6M parameters with random weights; returns the folder.

    Its weights are spread so wide that the logits tell one seed from another.
    """
    changed = {"tie_word_embeddings": tied, "initializer_range": 0.1, "max_position_embeddings": 1024}
    config = AutoConfig.from_pretrained(EXAMPLE, **changed)
    return write(random_model(config, seed), folder)


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The example's."""
    return AutoTokenizer.from_pretrained(EXAMPLE)
