"""Settings of training on preferences."""

from typing import Literal, Self

from pydantic import Field, model_validator

from cairn.config.data import RecordsConfig
from cairn.config.loss import LossConfig
from cairn.config.pair_loss import AnyPairLossConfig, BradleyTerryLossConfig, DPOLossConfig
from cairn.config.slurm import SlurmConfig
from cairn.config.trainer import TrainerBase


class PreferenceDataConfig(RecordsConfig):
    """Records of preferences: `chosen` and `rejected` answers, or for kto completions with a `label`."""

    batch_size: int = Field(default=64, ge=1)
    """Pairs per optimiser step, over all ranks; for kto, answers."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of answers beyond seq_len tokens: cut, or nothing is learned from their pair (drop)."""


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

    @model_validator(mode="after")
    def _streams_have_no_reference(self) -> Self:
        if self.data.streams and self.loss.reads_all:
            raise ValueError(
                f'loss.type = "{self.loss.type}" with read = "stream" ({", ".join(self.data.streams)}): '
                "before the first step the reference scores all records, and a stream is never read as a "
                'whole; give read = "indexed", or a loss without a reference (simpo, orpo)'
            )
        return self


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
