"""Scorers of whole models: made by the trainer's settings, and checked before they are used."""

import logging

import torch
from transformers import PreTrainedModel

from cairn.checkpoint.tensors.dtypes import DTYPES_IN_SETTINGS
from cairn.config.trainer import TrainerBase
from cairn.trainer.attention.choice import Device, choose
from cairn.trainer.group import RankGroup
from cairn.trainer.scoring.head import Head
from cairn.trainer.scoring.tokens import Scorer
from cairn.trainer.self_check import find_rows

logger = logging.getLogger(__name__)


def make_scorer(module: PreTrainedModel, config: TrainerBase, device: torch.device) -> Scorer:
    """What turns micro-batches into logprobs; all ranks call it."""
    vocabulary = module.config.get_text_config().vocab_size
    in_float32 = config.precision.settled(gpu=device.type == "cuda").head == "float32"
    return Scorer(module, device, Head.on(device, vocabulary, in_float32=in_float32))


def check_scorer(scorer: Scorer, config: TrainerBase, group: RankGroup, *, first: str | None = None) -> None:
    """Find out how samples must lie in rows, once the model's weights are loaded; all ranks call it.

    Args:
        first: the name of the rows to try first, such as those of the run so far.

    Raises:
        UsageError: the model does not score samples that share a micro-batch rightly.
    """
    precision = config.precision.settled(gpu=group.device.type == "cuda")
    device = Device.of(group.device, DTYPES_IN_SETTINGS[precision.compute])
    kernel, why = choose(config.attention, scorer.model, device)
    logger.info("attention to try first: %s (%s)", kernel.kind if kernel else "dense", why)
    scorer.rows = find_rows(
        scorer.checked,
        group,
        rounding=precision.rounding,
        must_pass=config.self_check,
        first=first,
        kernel=kernel,
        must_be_kernel=kernel is not None and config.attention != "auto",
    )
