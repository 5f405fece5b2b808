"""A reward model: a causal language model's layers with one number for a whole conversation.

A checkpoint holds it as transformers' models for sequence classification with one label, which transformers
and vLLM open: the number is the head's output at the last token.
"""

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from cairn.config.preferences import RewardConfig
from cairn.config.trainer import TrainerBase
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import BY_POSITIONS, dense
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, config_of
from cairn.trainer.models.value_model import ValuedModel, ValueModel, Valuer, layout_of_values
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import MicroBatch
from cairn.trainer.scoring.tokens import Scorer

logger = logging.getLogger(__name__)


class RewardModel(ValuedModel):
    """A reward model that is trained. Its head is 0 at first, unless the weights have one."""

    def __init__(self, folder: Path, config: RewardConfig, group: RankGroup):
        """Make the model that `folder` describes, its weights not yet loaded.

        Raises:
            UsageError: transformers has no model for sequence classification of its family.
        """
        module = build_model(folder, config, group.mesh, remade=partial(ValueModel, bias=False))
        self.values = cast(ValueModel, module)
        kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(self.values.config), None)
        if kind is None:
            raise UsageError(
                f"--model.name {folder}: transformers has no model for sequence classification of the family "
                f"{self.values.config.model_type}, so nothing could open the reward model"
            )
        self._kind = kind.__name__
        pad, ends = self.values.config.pad_token_id, self.values.config.eos_token_id
        if pad is not None and pad in (ends if isinstance(ends, list) else [ends]):
            logger.warning(
                "the model's padding is its end of text (token %d): transformers' reward model would not "
                "look at the end of a conversation, where this one gives its reward",
                pad,
            )
        super().__init__(module, make_optimizer(module.named_parameters(), config.optimizer))
        self._layout = layout_of_values(self.values)

    def beside(self) -> Mapping[str, bytes]:
        """The config.json of a model for sequence classification with one label."""
        about = json.loads(config_of(cast(PreTrainedModel, self.values), torch.float32)["config.json"])
        about |= {"architectures": [self._kind], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        return {"config.json": (json.dumps(about, indent=2) + "\n").encode()}

    def scorer(self, config: TrainerBase, device: torch.device) -> Scorer:
        """What gives each learned token the number of the token before it."""
        return Rewarder(self.values)


class Rewarder(Scorer):
    """Gives learned tokens the head's output at the token before, in the place of logprobs."""

    def __init__(self, values: ValueModel):
        """Score with `values`, whose weights may change in between."""
        self.model = cast(PreTrainedModel, values)
        self.rows = BY_POSITIONS
        self.attention = dense(self.model)
        self._valuer = Valuer(values)

    @property
    def checked(self) -> Any:
        """Numbers of the hidden states: a head of 0 would tell nothing."""
        return self._valuer

    def scores(
        self, micro: MicroBatch, temperature: float, *, entropies: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rewards, float32 [R, T - 1], in the place of logprobs, and 0 elsewhere."""
        self._valuer.rows = self.rows
        rewards = self._valuer.values(micro)
        everywhere = rewards.new_zeros(micro.input_ids.numel()).index_copy(0, micro.learned, rewards)
        return everywhere.view_as(micro.input_ids)[:, 1:], None


def with_reward_token(sample: Sample, row_length: int) -> Sample:
    """The sample with a token behind it, the only one that is learned; at most `row_length` tokens."""
    cut = sample.cut(row_length - 1)
    token_ids = np.append(cut.token_ids, np.int32(0)).astype(np.int32)
    loss_mask = np.zeros(len(token_ids), np.bool_)
    loss_mask[-1] = bool(sample.loss_mask.any())
    columns = {name: np.append(values, values[-1:]) for name, values in cut.columns.items()}
    return Sample(token_ids, loss_mask, columns)
