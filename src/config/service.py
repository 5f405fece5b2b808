"""Settings of the `service` command."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cairn.config.inference import InferenceConfig
from cairn.config.model import MAX_RANK
from cairn.config.settings import AbsolutePath, BaseConfig, refuse_twins, separate
from cairn.config.shared import CommandConfig
from cairn.run.machine import bytes_of, gpu_names

TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
KEY_PREFIX = "tml-"
"""How keys begin: the public client refuses others before it sends anything."""


class TenantConfig(BaseConfig):
    """Somebody who may use the service, with a key and quotas. Tenants see nothing of each other."""

    name: str
    """Name in the ledger and in logs: lower-case letters, digits, - and _."""
    key_variable: str | None = None
    """Environment variable with the tenant's key, which begins with tml- (or give key_file)."""
    key_file: str | None = None
    """File with the key alone (or give key_variable)."""
    models: int = Field(default=8, ge=1)
    """Models that the tenant may have at a time: neither unloaded nor of a finished session."""
    calls: int = Field(default=256, ge=1)
    """Calls that may wait or run at a time; the client sends further ones again later."""
    stored: str = "20G"
    """Room for the checkpoints that the tenant has saved, such as 500M or 20G."""

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not TENANT.fullmatch(value):
            raise ValueError(
                f"{value!r} is no tenant's name; it takes lower-case letters, digits, - and _, up to 64"
            )
        return value

    @field_validator("stored")
    @classmethod
    def _a_size(cls, value: str) -> str:
        bytes_of(value)
        return value

    @model_validator(mode="after")
    def _one_key(self) -> "TenantConfig":
        if (self.key_variable is None) == (self.key_file is None):
            raise ValueError(f"tenant {self.name!r}: give key_variable or key_file, one of them")
        return self


class ServiceConfig(CommandConfig):
    """Serves the Tinker API: clients train adapters of one base side by side, and sample from them."""

    command: ClassVar[str] = "cairn service"
    unlisted = frozenset({"machine"})
    names: Annotated[list[str], AfterValidator(separate)] = []
    """Names by which clients may ask for the model (default: model.name, and the name of its folder)."""
    host: str = "127.0.0.1"
    """Address to listen on; with any address but loopback, other machines can connect, and need a key."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    output_dir: AbsolutePath = Field(default="outputs/service", validate_default=True)
    """Folder of the ledger, the models' states and checkpoints; the same command goes on with it."""
    seed: int = Field(default=0, ge=0)
    """Seed of what clients leave open: first values of adapters without a seed, and samples without one."""
    workers: int = Field(default=1, ge=1)
    """Processes that compute passes side by side, each with the base in its memory (and on GPUs with a GPU of
    its own); another number changes the last bits of results."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker; another number changes the last bits of results."""
    seq_len: int = Field(default=4096, ge=2)
    """Maximum tokens of a sample, its last target included; longer ones are refused."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens per forward and backward pass (default: seq_len); a longer sample has one alone."""
    max_rank: int = Field(default=32, ge=1, le=MAX_RANK)
    """Largest rank that a client may ask for."""
    lora_alpha: float = Field(default=32, gt=0)
    """An adapter's update is scaled by lora_alpha / rank."""
    state_interval: int = Field(default=1, ge=1)
    """Save a model's state every N optimiser steps; after a crash the calls since are computed again."""
    states: int = Field(default=2, ge=1)
    """Saved states of each model that are kept; calls are kept back to the oldest, should one be damaged."""
    answer_hours: float = Field(default=24, gt=0)
    """Hours for which the answer to a call is kept for a client that asks again."""
    session_timeout: float = Field(default=600, gt=0)
    """Seconds without a heartbeat or call after which a client's models are saved, leave the memory and count
    no more in its quota; the next one brings them back. Public clients send heartbeats every 10 s."""
    resident_models: int = Field(default=16, ge=1)
    """Models kept in memory; the one used longest ago makes room, and comes back with its next call."""
    sampling: Literal["own", "given", "off"] = "own"
    """Who samples: a server that is started, that of inference_url, or nobody (such calls are refused)."""
    inference_url: str | None = None
    """Address of a running server with the base and --max-lora-rank, for sampling = given."""
    inference: InferenceConfig = InferenceConfig()
    tenants: list[TenantConfig] = []
    """Who may use it, as [[tenants]] tables (default: one, whose key is made at the first start)."""

    @field_validator("tenants")
    @classmethod
    def _names_of_their_own(cls, value: list[TenantConfig]) -> list[TenantConfig]:
        refuse_twins("tenants", "name", [one.name for one in value])
        return value

    @model_validator(mode="after")
    def _which_gpus(self) -> "ServiceConfig":
        gpus = self.inference.gpus
        if gpus not in (None, "0") and gpu_names(gpus) is None:
            raise ValueError(
                f"inference.gpus = {gpus!r}: a number of GPUs is given, and this command chooses none: "
                f"name them, such as 0,1 or, for number {gpus} alone, {gpus},"
            )
        return self

    @model_validator(mode="after")
    def _who_samples(self) -> "ServiceConfig":
        if (self.sampling == "given") != (self.inference_url is not None):
            raise ValueError(
                f"sampling = {self.sampling!r} with inference_url = {self.inference_url!r}: give both for a "
                "server that runs, sampling = 'given' and its address, or neither"
            )
        return self

    def settled(self, *, gpu: bool, gpu_servers: bool) -> "ServiceConfig":
        return self.model_copy(update={"inference": self.inference.settled(gpu=gpu, gpu_servers=gpu_servers)})
