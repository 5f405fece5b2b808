"""Settings of training on preferences."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from cairn.config.data import RecordsConfig
from cairn.config.loss import CustomLossConfig, LossConfig, by_type, tag_by_type
from cairn.config.settings import AbsolutePath
from cairn.config.shared import SlurmConfig
from cairn.config.trainer import TrainerBase

# Settings of the losses of preferences; each type of loss has its own.


TOGETHER = {"pairs": 2, "examples": 1}
"""By what a loss learns from, how many answers a unit of it has: pairs of a chosen and a rejected answer, or
examples, which are single answers that are desirable or undesirable."""


class PairLossConfig(LossConfig):
    """The settings that all types of them have."""

    @property
    def form(self) -> str:
        """What it learns from: a name in `TOGETHER`."""
        return "pairs"

    @property
    def together(self) -> int:
        """How many answers are always in one micro-batch."""
        return TOGETHER[self.form]

    @property
    def reads_all(self) -> bool:
        """Whether all records are read before the first step, as far as the settings tell."""
        return True


class DPOLossConfig(PairLossConfig):
    """Direct preference optimisation."""

    type: Literal["dpo"] = "dpo"
    """What to minimise: dpo, ipo, kto, simpo, orpo, or your own loss (module:Class)."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """dpo: scale of the log-ratios to the reference; a larger one keeps the model closer to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo: the probability that the answers of a pair are the wrong way round (conservative DPO)."""


class IPOLossConfig(PairLossConfig):
    """Identity preference optimisation: a margin to reach, and not to exceed."""

    type: Literal["ipo"] = "ipo"
    """What to minimise: dpo, ipo, kto, simpo, orpo, or your own loss (module:Class)."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """ipo: the margin of the mean log-ratios per token to reach is 1 / (2 beta)."""


class KTOLossConfig(PairLossConfig):
    """Kahneman-Tversky optimisation: single answers, each desirable or undesirable."""

    type: Literal["kto"] = "kto"
    """What to minimise: dpo, ipo, kto, simpo, orpo, or your own loss (module:Class)."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """kto: scale of the log-ratios to the reference; a larger one keeps the model closer to it."""
    desirable_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """kto: weight of desirable answers, such as undesirable / desirable where there are fewer of them."""
    undesirable_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """kto: weight of undesirable answers."""

    @property
    def form(self) -> str:
        return "examples"

    @model_validator(mode="after")
    def _one_counts(self) -> Self:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError(
                "desirable_weight = undesirable_weight = 0: nothing would be learned; one must be above 0"
            )
        return self


class SimPOLossConfig(PairLossConfig):
    """Simple preference optimisation: mean logprobs, without a reference."""

    type: Literal["simpo"] = "simpo"
    """What to minimise: dpo, ipo, kto, simpo, orpo, or your own loss (module:Class)."""
    beta: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """simpo: scale of the answers' mean logprobs per token."""
    gamma: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """simpo: the margin that the scaled difference has to exceed."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """simpo: the probability that the answers of a pair are the wrong way round."""

    @property
    def reads_all(self) -> bool:
        return False


class ORPOLossConfig(PairLossConfig):
    """Odds ratio preference optimisation: SFT on the chosen answer, and the odds ratio; no reference."""

    type: Literal["orpo"] = "orpo"
    """What to minimise: dpo, ipo, kto, simpo, orpo, or your own loss (module:Class)."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """orpo: weight of the odds ratio beside the chosen answer's likelihood (lambda in the paper)."""

    @property
    def reads_all(self) -> bool:
        return False


class BradleyTerryLossConfig(PairLossConfig):
    """The likelihood of preferences under the rewards that a model gives."""

    type: Literal["bradley_terry"] = "bradley_terry"
    """What to minimise: bradley_terry."""
    center: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the square of a pair's sum of rewards, which keeps rewards around 0, such as 0.01."""

    @property
    def reads_all(self) -> bool:
        return False


class CustomPairLossConfig(CustomLossConfig, PairLossConfig):
    """A loss of your own."""

    type: str
    """What to minimise: dpo, ipo, kto, simpo, orpo, or your own loss (module:Class)."""

    records: Literal["pairs", "examples"] = "pairs"
    """module:Class: what it learns from, pairs of answers, or examples, each desirable or undesirable."""

    @property
    def form(self) -> str:
        return self.records

    @property
    def reads_all(self) -> bool:
        return self.form == "examples"

    @classmethod
    def built_in(cls) -> Iterable[str]:
        return PAIR_LOSSES


PAIR_LOSSES = by_type(DPOLossConfig, IPOLossConfig, KTOLossConfig, SimPOLossConfig, ORPOLossConfig)
"""By type; the first is the default."""

AnyPairLossConfig = Annotated[
    Annotated[DPOLossConfig, Tag("dpo")]
    | Annotated[IPOLossConfig, Tag("ipo")]
    | Annotated[KTOLossConfig, Tag("kto")]
    | Annotated[SimPOLossConfig, Tag("simpo")]
    | Annotated[ORPOLossConfig, Tag("orpo")]
    | Annotated[CustomPairLossConfig, Tag("module:Class")],
    Discriminator(tag_by_type(PAIR_LOSSES)),
]
"""The settings of one type; `type` says which."""


class PreferenceDataConfig(RecordsConfig):
    """Records of preferences: `chosen` and `rejected` answers, or for kto completions with a `label`."""

    batch_size: int = Field(default=64, ge=1)
    """Pairs per optimiser step, over all ranks; for kto, answers."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of answers beyond seq_len tokens: cut, or nothing is learned from their pair (drop)."""


class DPOConfig(TrainerBase):
    """Learning from preferences (DPO, IPO, KTO, SimPO, ORPO) with FSDP2 on Ray workers."""

    task = "dpo"
    output_dir: AbsolutePath = Field(default="outputs/dpo", validate_default=True)
    """Run directory: everything that the run writes goes there."""
    data: PreferenceDataConfig = PreferenceDataConfig()
    loss: AnyPairLossConfig = DPOLossConfig()
    slurm: SlurmConfig | None = None

    @property
    def together(self) -> int:
        return self.loss.together

    @property
    def own_loss(self) -> LossConfig | None:
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
    output_dir: AbsolutePath = Field(default="outputs/reward", validate_default=True)
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
