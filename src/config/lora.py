"""Settings of low-rank adapters."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cairn.config.base import BaseConfig

ALL_LINEAR = "all-linear"
MAX_RANK = 512
"""The largest rank of adapters that vLLM computes beside a model."""


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
    serve: Literal["merged", "adapter", "unmerged"] = "merged"
    """RL: servers get the merged model, the adapter to merge, or adapters to compute beside the base."""
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

    @model_validator(mode="after")
    def _servers_can_compute_it(self) -> "LoraConfig":
        if self.serve != "unmerged":
            return self
        if self.modules_to_save:
            raise ValueError(
                f'lora.modules_to_save = {self.modules_to_save} beside lora.serve = "unmerged": vLLM '
                'computes only low-rank updates beside a model; lora.serve = "adapter" and "merged" serve '
                "whole modules"
            )
        if self.rank > MAX_RANK:
            raise ValueError(
                f'lora.rank = {self.rank} beside lora.serve = "unmerged": vLLM computes adapters of rank '
                f'{MAX_RANK} at most; lora.serve = "adapter" and "merged" serve any'
            )
        return self

    @property
    def shape(self) -> dict[str, object]:
        """What decides which function a saved adapter is, so that a resumed run can't change it."""
        return self.model_dump(include={"rank", "alpha", "targets", "rslora", "modules_to_save"})
