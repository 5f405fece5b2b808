"""Settings of low-rank adapters."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cairn.config.base import BaseConfig

ALL_LINEAR = "all-linear"


class LoraConfig(BaseConfig):
    """Train a low-rank adapter (LoRA, Hu et al. 2021) beside weights that stay as they are."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapted layer's update: its matrices are [rank, inputs] and [outputs, rank]."""
    alpha: float = Field(default=32, gt=0)
    """The update is scaled by alpha / rank, or with rslora by alpha / sqrt(rank)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Part of an adapted layer's inputs that its adapter does not see in a training step."""
    targets: list[str] = [ALL_LINEAR]
    """Linear layers to adapt: ends of their names, such as q_proj; all-linear: all but the head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rank-stabilised LoRA, Kalajdzievski 2023)."""
    modules_to_save: list[str] = []
    """Modules that are trained in full beside the adapter, and saved with it: ends of their names."""
    serve: Literal["merged", "adapter"] = "merged"
    """What an RL run's servers get: the merged model, or the adapter, which they merge themselves."""
    save_base: bool = False
    """Have each checkpoint hold the base model, too: copied once, then hard-linked from step to step."""
    base: str | None = None
    """To resume: the base model's folder, if it is no longer where the checkpoint says."""

    @field_validator("targets", "modules_to_save")
    @classmethod
    def _separate(cls, value: list[str]) -> list[str]:
        return sorted({name.strip() for part in value for name in part.split(",") if name.strip()})

    @model_validator(mode="after")
    def _targets_fit(self) -> "LoraConfig":
        if not self.targets:
            raise ValueError("lora.targets is empty: name layers, such as q_proj,v_proj, or all-linear")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"lora.targets: {ALL_LINEAR} stands for all of them, and is given alone")
        return self

    @property
    def shape(self) -> dict[str, object]:
        """What decides which function a saved adapter is, so that a resumed run can't change it."""
        return self.model_dump(include={"rank", "alpha", "targets", "rslora", "modules_to_save"})
