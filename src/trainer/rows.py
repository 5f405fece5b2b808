"""How samples lie in rows so that none sees another, which depends on the model.

Most models keep samples apart by their positions, which start anew with each, so rows are packed. Some do so
only if they are given masks. Those that carry state from token to token (state spaces, convolutions, linear
attention), or take a token's distance from its place in the row (ALiBi), get one sample a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

from cairn.trainer.packing import Arrange, one_a_row, pack


@dataclass(frozen=True)
class Rows:
    """One way; `ROWS` lists all.

    arrange: which samples share a row. arguments: what the model's forward gets beside tokens and positions
    (int64 [R, T] both), made of its configuration and the positions.
    """

    name: str
    arrange: Arrange
    arguments: Callable[[PreTrainedConfig, torch.Tensor], dict[str, Any]]


class NoMasks(Exception):
    """transformers knows no masks for the model's layers."""


def _nothing(config: PreTrainedConfig, position_ids: torch.Tensor) -> dict[str, Any]:
    return {}


def _masks(config: PreTrainedConfig, position_ids: torch.Tensor) -> dict[str, Any]:
    """The masks that the model would make if it looked at positions, sliding windows included.

    Raises:
        NoMasks: there are none for such layers.
    """
    like = torch.empty(*position_ids.shape, 0, device=position_ids.device)  # only its shape and type count
    masks = create_masks_for_generate(config, like, None, None, position_ids=position_ids)
    if masks is None:
        raise NoMasks("transformers makes no masks for its layers")
    return {"attention_mask": masks}


BY_POSITIONS = Rows("packed", pack, _nothing)
BY_MASKS = Rows("packed, with masks", pack, _masks)
ALONE = Rows("one sample a row", one_a_row, _nothing)
ROWS = (BY_POSITIONS, BY_MASKS, ALONE)
"""In the order of how fast they are."""
