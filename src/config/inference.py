"""Configuration of the `inference` role."""

from pydantic import Field, field_validator

from cairn.config.model import ModelConfig
from cairn.config.shared import CommandConfig

OURS = {
    "model": "--model.name",
    "host": "--host",
    "port": "--port",
    "dtype": "--dtype",
    "max-model-len": "--max-model-len",
    "max-num-seqs": "--max-num-seqs",
    "tensor-parallel-size": "--tensor-parallel",
    "kv-cache-memory-bytes": "--kv-cache-memory",
    "logprobs-mode": None,
    "generation-config": None,
    "weight-transfer-config": None,
    "api-key": None,
}
"""Arguments of vLLM's that Cairn gives itself, and the setting for each. Without one it must stay as it is:
the trainer's loss needs the logprobs of the distribution that was sampled from, and no sampling defaults."""


class InferenceConfig(CommandConfig):
    """The vLLM inference server."""

    model: ModelConfig = ModelConfig()
    """Initial weights and tokenizer; a run loads its own weights later."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback is reachable from other machines."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    dtype: str = "auto"
    """Data type of weights and activations: auto (as saved), float32, bfloat16 or float16."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus answer, in tokens; default: the model's own limit."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum number of sequences generated at once."""
    kv_cache_memory: str | None = None
    """Bytes for the KV cache, such as 64M or 4G; default: vLLM's choice on GPU, 1G on CPU."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine (CPU only); with 1, tokens don't depend on the batch."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs over which one copy of the model is split."""
    compile: bool = False
    """Let vLLM compile the model: slower to start, faster to generate."""
    startup_timeout: float = Field(default=300, gt=0)
    """Seconds to wait for the server to become healthy before giving up."""
    vllm_args: list[str] = []
    """Further arguments for vLLM's server, passed on unchanged."""

    @field_validator("vllm_args")
    @classmethod
    def _not_ours(cls, value: list[str]) -> list[str]:
        for argument in value:
            name = argument.split("=")[0].lstrip("-").replace("_", "-")
            if argument.startswith("-") and name in OURS:
                instead = f"set it with {OURS[name]}" if OURS[name] else "runs depend on the value it has"
                raise ValueError(f"{argument} is an argument that Cairn gives vLLM itself; {instead}")
        return value
