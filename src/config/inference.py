"""Settings of the `inference` command."""

import itertools
import re
from typing import Literal, Self

from pydantic import Field, field_validator

from cairn.config.model import MAX_RANK, ModelConfig
from cairn.config.shared import CommandConfig, Gpus

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
    "override-generation-config": None,
    "logits-processors": None,
    "weight-transfer-config": None,
    "hf-overrides": None,
    "api-key": None,
    "enable-return-routed-experts": "--return-experts",
    "enable-lora": "--max-lora-rank",
    "max-lora-rank": "--max-lora-rank",
    "max-loras": "--max-loras",
    "max-cpu-loras": "--max-loras",
    "lora-modules": None,
    "lora-target-modules": None,
    "lora-dtype": None,
}
"""vLLM arguments that Cairn sets itself, with Cairn's setting for each. Those without one must not be
changed: the trainer's loss needs logprobs of the distribution that was sampled from, no default sampling
parameters, no further change of logits, no adapter but the run's, and a model that computes what the
trainer's does (config.json is the place to change both)."""

SIZE = re.compile(r"[0-9]+[KMGT]?|[0-9]+(\.[0-9]+)?[kmgt]")
"""The sizes that vLLM reads: those of 1024 are whole."""
PARALLEL = ("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
"""vLLM's arguments by which a server needs more than `tensor_parallel` GPUs."""
OPTION = re.compile(r"--[\w.+-]+")
"""The name of an option, perhaps with a key of its JSON value."""


class InferenceConfig(CommandConfig):
    """The vLLM inference server."""

    unlisted = frozenset({"colocated"})
    model: ModelConfig = ModelConfig()
    """Initial weights and tokenizer; a run replaces the weights."""
    host: str = "127.0.0.1"
    """Address to listen on; with any address but loopback, other machines can connect."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    dtype: str = "auto"
    """auto (as in the files, but bfloat16 for float32 on GPUs), float32, bfloat16 or float16."""
    head: Literal["auto", "float32", "model"] = "auto"
    """Data type of logits: float32, or the model's (dtype); auto is float32 on GPUs, the model's on CPUs."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of a prompt plus its answer (default: the model's limit)."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum sequences generated together (default: 64 on CPUs, 256 with colocate, else vLLM's choice)."""
    kv_cache_memory: str | None = None
    """Memory for the KV cache, such as 64M or 4G (default: 1G on CPU, vLLM's choice on GPU)."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine (CPU only); with 1, tokens do not depend on the other requests."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """Number of GPUs to split each copy of the model over (default: 1; in rl as many as the memory needs)."""
    gpus: Gpus = None
    """GPUs that serve: how many, or which, such as 2,3 or 3, for one (default in rl: those not training)."""
    compile: bool | None = None
    """Let vLLM compile the model, and use CUDA graphs on GPUs: starts more slowly (default: on GPUs only)."""
    startup_timeout: float | None = Field(default=None, gt=0)
    """Seconds within which the server must become healthy (default: 300 on CPUs, 1800 on GPUs)."""
    colocated: bool = False
    """Be able to sleep, and don't start while a step is trained; rl --colocate sets it."""
    max_lora_rank: int | None = Field(default=None, ge=1, le=MAX_RANK)
    """Take only adapters, up to this rank, and compute them unmerged; rl sets it by lora.serve."""
    max_loras: int = Field(default=4, ge=1)
    """Policies that one batch may hold answers of (with max_lora_rank); rl raises it if it needs more."""
    return_experts: bool = False
    """Tell clients the experts that are chosen for each token; rl sets it by trainer.router_replay."""
    vllm_args: list[str] = []
    """Further arguments for vLLM's server, passed on unchanged."""

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def size(self) -> int:
        """The number of GPUs that one server uses."""
        size = self.tensor_parallel or 1
        words = [word for argument in self.vllm_args for word in argument.split("=", 1)]
        for name, value in itertools.pairwise(words):
            if name.replace("_", "-") in PARALLEL and value.isdecimal():
                size *= int(value)
        return size

    def settled(self, *, gpu: bool = False, gpu_servers: bool) -> Self:
        head = ("float32" if gpu_servers else "model") if self.head == "auto" else self.head
        settled = self.model_copy(update={"head": head})
        settled = settled.left_to(tensor_parallel=1)
        if gpu_servers:
            # Beside a trainer vLLM is given the cache's size, and does not look whether a full batch fits.
            most = {"max_num_seqs": 256} if self.colocated else {}
            return settled.left_to(compile=True, startup_timeout=1800.0, **most)
        return settled.left_to(compile=False, startup_timeout=300.0, max_num_seqs=64)

    @field_validator("kv_cache_memory")
    @classmethod
    def _a_size(cls, value: str | None) -> str | None:
        """A size as vLLM reads it: a number of bytes, or one with k, m, g, t (1000) or K, M, G, T (1024)."""
        if value is not None and not SIZE.fullmatch(value.strip()):
            raise ValueError(f"{value!r} is no size; give whole bytes, or a size such as 64M, 4G or 1.5g")
        return value

    @field_validator("vllm_args")
    @classmethod
    def _not_ours(cls, value: list[str]) -> list[str]:
        for argument in value:
            if argument.startswith("--") and not OPTION.fullmatch(argument.split("=")[0]):
                raise ValueError(
                    f"{argument!r} is no option of vLLM: write --name=value, or two words, --name and value"
                )
            # vLLM takes keys of JSON arguments behind a dot: --hf-overrides.rope_theta=1e6
            name = argument.split("=")[0].lstrip("-").split(".")[0].replace("_", "-")
            if argument.startswith("-") and name in OURS:
                instead = f"set it with {OURS[name]}" if OURS[name] else "runs depend on its value"
                raise ValueError(f"{argument} is an argument that Cairn sets itself; {instead}")
        return value
