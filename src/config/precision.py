"""Settings of the data types that training computes in."""

from typing import Literal

from cairn.config.base import BaseConfig


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
