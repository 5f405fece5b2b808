"""The policy of a run: the whole model, or an adapter in it."""

from pathlib import Path

from cairn.config.trainer import TrainerBase
from cairn.trainer.group import RankGroup
from cairn.trainer.models.adapter import make_adapter
from cairn.trainer.models.model import build_model
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer


def make_policy(folder: Path, config: TrainerBase, group: RankGroup) -> Trained:
    """The policy that the Hugging Face directory `folder` describes, its weights not yet loaded."""
    if config.lora:
        return make_adapter(folder, config, group)
    module = build_model(folder, config, group.mesh)
    return Trained(module, make_optimizer(module.named_parameters(), config.optimizer))
