"""Settings of training on preferences."""

import os
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cairn.config.base import BaseConfig
from cairn.config.loss import LossConfig
from cairn.config.pair_loss import AnyPairLossConfig, BradleyTerryLossConfig, DPOLossConfig
from cairn.config.slurm import SlurmConfig
from cairn.config.trainer import TrainerBase


class PreferenceDataConfig(BaseConfig):
    """Records of preferences: `chosen` and `rejected` answers, or for kto completions with a `label`."""

    name: str = ""
    """A .jsonl, .json, .parquet or .csv file, a folder of such files or from save_to_disk, or a hub name."""
    split: str = "train"
    """Split to train on, or a slice of it such as train[:1000]; a single file has only train."""
    batch_size: int = Field(default=64, ge=1)
    """Pairs per optimiser step, over all ranks; for kto, answers."""
    shuffle: bool = True
    """Shuffle the records anew in every epoch, by the seed; off: keep the file's order."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of answers beyond seq_len tokens: cut, or nothing is learned from their pair (drop)."""

    @property
    def split_setting(self) -> str:
        """What sets the split, as messages show it."""
        return "--data.split"

    @property
    def part(self) -> None:
        """All of the split is read."""

    @property
    def setting(self) -> str:
        """What sets the data set, as messages show it."""
        return "--data.name"

    @field_validator("name")
    @classmethod
    def _absolute(cls, value: str) -> str:
        # Workers of a running Ray cluster have another current directory. A name on the hub stays as it is.
        return os.path.abspath(value) if value and os.path.exists(value) else value


class DPOConfig(TrainerBase):
    """Learning from preferences (DPO, IPO, KTO, SimPO, ORPO) with FSDP2 on Ray workers."""

    task = "dpo"
    output_dir: str = Field(default="outputs/dpo", validate_default=True)
    """Run directory: everything that the run writes goes there."""
    data: PreferenceDataConfig = PreferenceDataConfig()
    loss: AnyPairLossConfig = DPOLossConfig()
    slurm: SlurmConfig | None = None

    @property
    def together(self) -> int:
        return self.loss.together

    @property
    def own_loss(self) -> LossConfig | None:
        """The loss, if it is a class of the user's own."""
        return self.loss if self.loss.is_own else None


class RewardConfig(TrainerBase):
    """Training a reward model on preferences with FSDP2 on Ray workers."""

    task = "reward"
    unlisted = frozenset({"lora", "router_aux_coef"})
    output_dir: str = Field(default="outputs/reward", validate_default=True)
    """Run directory: everything that the run writes goes there."""
    data: PreferenceDataConfig = PreferenceDataConfig()
    loss: BradleyTerryLossConfig = BradleyTerryLossConfig()
    router_aux_coef: float | None = Field(default=0.0, ge=0)
    """Must be 0: reward models are trained without a mixture of experts' load-balancing loss."""
    slurm: SlurmConfig | None = None

    @property
    def together(self) -> int:
        return self.loss.together

    @model_validator(mode="after")
    def _whole_models_only(self) -> Self:
        if self.lora is not None:
            raise ValueError("lora: reward models are trained in full; leave the section out")
        if self.router_aux_coef:
            raise ValueError(
                f"router_aux_coef = {self.router_aux_coef:g}: reward models are trained without that loss; "
                "leave it out"
            )
        return self
