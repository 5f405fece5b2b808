"""Settings of the model: what is trained, low-rank adapters, and data types."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cairn.config.settings import BaseConfig, separate


class ModelConfig(BaseConfig):
    """Model and tokenizer."""

    name: str = ""
    """Hugging Face directory, step_N, other program's checkpoint, or name on the hub (owner/name)."""
    config: str | None = None
    """Folder with config.json and tokenizer, for another program's checkpoint that has none beside it."""
    init_seed: int | None = Field(default=None, ge=0)
    """Seed for random weights, if the directory has a config and a tokenizer but no weights."""


# Settings of low-rank adapters.


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
        return sorted({*separate(value)})

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


# Settings of the data types that training computes in.


class PrecisionConfig(BaseConfig):
    """FSDP2's mixed precision; master weights and optimiser state are always float32."""

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the forward and backward passes; auto is bfloat16 on GPUs and float32 on CPUs."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are summed across ranks."""
    float32_matmul: Literal["auto", "highest", "high"] = "auto"
    """Float32 matrix products: high is TF32; auto is high beside bfloat16 on GPUs, and highest elsewhere."""
    head: Literal["auto", "float32", "compute"] = "auto"
    """Data type of logits: float32, or that of the computation; auto is float32 on GPUs."""

    def settled(self, *, gpu: bool) -> "PrecisionConfig":
        """With the values that `auto` means on a GPU or CPU.

        Whoever asks for float32 gets it: TF32 rounds as float16 does. TF32 is no less deterministic, so
        `deterministic` leaves it on.
        """
        compute = self.compute
        if compute == "auto":
            compute = "bfloat16" if gpu else "float32"
        matmul = self.float32_matmul
        if matmul == "auto":
            matmul = "high" if gpu and compute == "bfloat16" else "highest"
        head = self.head
        if head == "auto":
            head = "float32" if gpu and compute == "bfloat16" else "compute"
        return self.model_copy(update={"compute": compute, "float32_matmul": matmul, "head": head})

    @property
    def rounding(self) -> str:
        """The data type whose rounding the results have, once the precision is settled."""
        tf32 = self.compute == "float32" and self.float32_matmul == "high"
        return "float16" if tf32 else self.compute
