"""How samples lie in rows so that none sees another, which depends on the model.

Most models keep samples apart by their positions, which start at 0 with each sample, so that several samples
can share a row. Some models need masks for that. Models that carry state from token to token (state spaces,
convolutions, linear attention), or that measure distances by the place in the row (ALiBi), get one sample a
row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

from cairn.trainer.packing import Arrange, one_a_row, shared_rows


@dataclass(frozen=True)
class Rows:
    """One way to lay samples in rows; `ROWS` lists all ways.

    arrange: which samples share a row. arguments: further arguments of the model's forward, computed from its
    configuration and the positions of the tokens (int64 [R, T]).
    """

    name: str
    arrange: Arrange
    arguments: Callable[[PreTrainedConfig, torch.Tensor], dict[str, Any]]


class NoMasks(Exception):
    """transformers can't make masks for the model's layers."""


def _nothing(config: PreTrainedConfig, position_ids: torch.Tensor) -> dict[str, Any]:
    return {}


def _masks(config: PreTrainedConfig, position_ids: torch.Tensor) -> dict[str, Any]:
    """Attention masks that keep samples apart by their positions, sliding windows included.

    Raises:
        NoMasks: transformers makes none for such layers.
    """
    like = torch.empty(*position_ids.shape, 0, device=position_ids.device)  # only its shape and type count
    masks = create_masks_for_generate(config, like, None, None, position_ids=position_ids)
    if masks is None:
        raise NoMasks("transformers makes no masks for its layers")
    return {"attention_mask": masks}


BY_POSITIONS = Rows("packed", shared_rows, _nothing)
BY_MASKS = Rows("packed, with masks", shared_rows, _masks)
ALONE = Rows("one sample a row", one_a_row, _nothing)
ROWS = (BY_POSITIONS, BY_MASKS, ALONE)
"""The fastest first."""
