# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Settings of a complete RL run: those of each role, and those that they share."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from cairn.config.branches import BranchesConfig
from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import IN_FLIGHT, OrchestratorConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.shared import (
    CommandConfig,
    RLSlurmConfig,
    SharedConfig,
    SupervisionConfig,
)
from cairn.config.teachers import ONLY_AT_ONE, is_served
from cairn.run.machine import gpu_list, gpu_names
from cairn.run.object_store import is_loopback

SERVER = "inference"
"""The role of a run's own server, and of the first of several."""
DERIVED = {"max_lora_rank", "max_loras", "return_experts"}
"""Settings of servers that follow from those of the trainer."""


class ServersConfig(InferenceConfig):
    """The vLLM servers that a run starts."""

    servers: int | None = Field(default=None, ge=1)
    """Number of servers (in a Slurm job, on each of its nodes), at ports in sequence.

    (default: 1 on CPUs; on GPUs, as many as fit onto those that do not train: half, unless settings say so)
    """

    @property
    def each(self) -> Mapping[str, "ServersConfig"]:
        """The settings of each server by its role's name, with its own port and its part of the GPUs."""
        count, gpus = self.servers or 1, gpu_names(self.gpus or "0") or ()
        size = len(gpus) // count
        return {
            SERVER if number == 0 else f"{SERVER}_{number}": self.model_copy(
                update={
                    "servers": 1,
                    "port": self.port + number,
                    "gpus": gpu_list(list(gpus[size * number : size * (number + 1)])) if gpus else self.gpus,
                }
            )
            for number in range(count)
        }

    @model_validator(mode="after")
    def _ports_are_there(self) -> Self:
        if (last := self.port + (self.servers or 1) - 1) > 65535:
            raise ValueError(
                f"port = {self.port} and servers = {self.servers}: the last one would listen on port {last}, "
                "and the highest is 65535; choose a lower port"
            )
        return self

    def settled(self, *, gpu: bool = False, gpu_servers: bool) -> Self:
        return super().settled(gpu=gpu, gpu_servers=gpu_servers).left_to(servers=1)


ROLES: dict[str, type[CommandConfig]] = {
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    SERVER: ServersConfig,
}
SHARED = {
    role: tuple(
        name
        for name in (*SharedConfig.model_fields, *SupervisionConfig.model_fields)
        if name in config.model_fields
    )
    for role, config in ROLES.items()
}
"""The shared settings that each role has."""


class RLConfig(SharedConfig, SupervisionConfig):
    """Reinforcement learning: a trainer, an orchestrator and, unless given addresses of some, servers."""

    shared: ClassVar[dict[str, tuple[str, ...]]] = SHARED
    repeated: ClassVar[frozenset[str]] = frozenset({"branch"})

    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: ServersConfig = ServersConfig()
    colocate: bool | None = None
    """Trainer and server take turns on one GPU (default: where there is only one for both)."""
    branch: list[str] = []
    """Files of settings over the others, each of which makes a branch: docs/how-to/branches.md."""
    branches: BranchesConfig = BranchesConfig()
    slurm: RLSlurmConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_shared_values_once(cls, data: Any) -> Any:
        """Copy the run's value, or the value in a role's file, to every role."""
        if not isinstance(data, dict):
            return data
        roles = {role: dict(data.get(role) or {}) for role in SHARED}
        shared: dict[str, Any] = {}
        for key in SHARED["trainer"]:
            for owner in [*roles.values(), data]:  # the run's own value comes last, so it wins
                if key in owner:
                    shared[key] = _merge(shared.get(key), owner[key])
        for role, keys in SHARED.items():
            roles[role].update({key: shared[key] for key in keys if key in shared})
        return {**data, **shared, **roles}

    @model_validator(mode="after")
    def _batches_are_shipped(self) -> Self:
        if self.trainer.recorded_batches is not None:
            raise ValueError(
                f"trainer.recorded_batches = {self.trainer.recorded_batches!r}: the orchestrator ships this "
                "run's batches; leave it out (ckpt replay trains on recorded ones)"
            )
        return self

    @model_validator(mode="after")
    def _critic_and_advantages_agree(self) -> Self:
        if problem := self.trainer.problem_with_advantages(self.orchestrator.advantage_types):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _teachers_fit(self) -> Self:
        temperature, teachers = self.orchestrator.sampling.temperature, self.trainer.teachers
        served = {column: source for column, source in teachers.items() if is_served(source)}
        if served and temperature != 1:
            column, url = next(iter(served.items()))
            raise ValueError(
                f"trainer.{self.trainer.sources_of[column]} = {url}: {ONLY_AT_ONE}, and "
                f"orchestrator.sampling.temperature = {temperature:g}: sample at 1, or give a folder"
            )
        kinds = {one.advantage.type for one in self.orchestrator.of_environments()}
        if "none" in kinds and not self.trainer.distill:
            raise ValueError(
                "orchestrator.advantage.type = 'none' leaves nothing to learn but from a teacher: give "
                "trainer.distill.teacher, or another advantage"
            )
        return self

    @model_validator(mode="after")
    def _servers_take_what_is_sent(self) -> Self:
        lora, rank = self.trainer.lora, self.inference.max_lora_rank
        if lora is None or lora.serve != "unmerged":
            if rank is not None:
                raise ValueError(
                    f"inference.max_lora_rank = {rank}: such a server takes nothing but adapters; give "
                    'trainer.lora.serve = "unmerged" as well, or leave it out'
                )
        elif rank is not None and rank < lora.rank:
            raise ValueError(
                f"inference.max_lora_rank = {rank} is less than trainer.lora.rank = {lora.rank}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _others_know_what_is_replayed(self) -> Self:
        if self.trainer.router_replay:
            inference = self.inference.deriving(return_experts=True)
            orchestrator = self.orchestrator.deriving(router_replay=True)
            object.__setattr__(self, "inference", inference)
            object.__setattr__(self, "orchestrator", orchestrator)
        return self

    @model_validator(mode="after")
    def _own_servers_compute_adapters(self) -> Self:
        """Set what the servers need that the run starts, in whatever way it does."""
        if self.trainer.lora and self.trainer.lora.serve == "unmerged":
            rank, loras = self.inference.max_lora_rank or self.trainer.lora.rank, self.inference.max_loras
            loras = max(loras, self.versions_in_flight)
            inference = self.inference.deriving(max_lora_rank=rank, max_loras=loras)
            object.__setattr__(self, "inference", inference)
        return self

    @property
    def versions_in_flight(self) -> int:
        """Policies of which a server may have answers in progress: those in use, and the one being loaded."""
        return self.orchestrator.max_off_policy_steps + 2

    def settled(self, *, gpu: bool, gpu_servers: bool) -> Self:
        roles = {role: getattr(self, role).settled(gpu=gpu, gpu_servers=gpu_servers) for role in ROLES}
        if not self.orchestrator.inference_url:
            in_flight = IN_FLIGHT * roles[SERVER].servers
            orchestrator = self.orchestrator.left_to(max_in_flight=in_flight)
            roles["orchestrator"] = orchestrator.settled(gpu=gpu, gpu_servers=gpu_servers)
        return self.model_copy(update=roles)

    def towards_servers(self) -> Self:
        """With ranks that listen on the network of the first server which is not on this machine."""
        hosts = (urlsplit(url).hostname for url in self.orchestrator.inference_url)
        elsewhere = next((host for host in hosts if host and not is_loopback(host)), None)
        host = self.trainer.weight_host or elsewhere
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"weight_host": host})})

    def sharing(self, **values: Any) -> Self:
        roles = {
            role: getattr(self, role).model_copy(
                update={key: value for key, value in values.items() if key in keys}
            )
            for role, keys in SHARED.items()
        }
        return super().sharing(**values, **roles)


def serving_all(each: Mapping[str, RLConfig], at_once: int) -> ServersConfig:
    """The settings of a server for all branches, which holds the policies of so many of them at a time."""
    first = next(iter(each.values()))
    ranks = [one.inference.max_lora_rank for one in each.values()]
    loras = max(one.inference.max_loras for one in each.values()) * at_once
    return first.inference.deriving(
        max_lora_rank=max((one for one in ranks if one), default=None),
        max_loras=loras,
        return_experts=any(one.inference.return_experts for one in each.values()),
    )


def _merge(low: Any, high: Any) -> Any:
    if isinstance(low, dict) and isinstance(high, dict):
        return {**low, **{key: _merge(low.get(key), value) for key, value in high.items()}}
    return high
