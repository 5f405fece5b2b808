"""Settings of the trainer of an RL run: what it makes of batches, and how servers get its policies."""

from collections.abc import Collection, Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cairn.config.loss import LossConfig, PolicyLossConfig, PPOClipConfig
from cairn.config.teachers import AuxiliaryModel, CriticConfig, WithTeachers, critic_problem
from cairn.config.trainer import TrainerBase


class TrainerConfig(WithTeachers, TrainerBase):
    """The trainer of an RL run: trains on the orchestrator's batches and publishes policies."""

    task = "rl"
    beside_servers = True
    unlisted = frozenset({"colocated", "recorded_batches"})
    loss: PolicyLossConfig = PPOClipConfig()
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser updates in each step; several of them use a batch's answers more than once, or in parts."""
    mini_batches: int | None = Field(default=None, ge=1)
    """Parts that a batch is divided into; updates go through them in turn (default: updates_per_batch)."""
    critic: CriticConfig | None = None
    weight_transport: Literal["files", "network", "store"] = "files"
    """How servers get policies: files, network (from the trainer's memory), or store (at --ckpt.remote)."""
    weight_encoding: Literal["full", "delta"] = "full"
    """What servers get of policies: all values, or only what has changed (small with bfloat16 policies and
    low learning rates; the trainer and each server keep a copy of the policy in host memory)."""
    publish_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which servers get policies; auto is that of the trainer's computation."""
    weight_host: str | None = None
    """With network: the trainer's address for servers; for ranks on several machines, a server's address."""
    router_replay: bool = False
    """Have tokens pass through the experts that servers chose for them (mixtures of experts)."""
    batch_timeout: float = Field(default=1800, gt=0)
    """Seconds to wait for the orchestrator's next batch."""
    keep_tokens_gb: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Gigabytes to keep in tokens/ of what was computed of each learned token, for dash and cairn.Run; the
    oldest steps go first. 0 keeps none."""
    keep_batches_gb: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Gigabytes of batches to keep in trained/ for ckpt replay; the oldest go first. 0 keeps none."""
    recorded_batches: str | None = None
    """Train on the batches in this folder, without an orchestrator; ckpt replay does (trainer only)."""
    cut_rollouts: bool = False
    """Let rollouts be longer than seq_len, and their ends not be learned; otherwise that is refused."""
    colocated: bool = False
    """Train only while the servers sleep; rl --colocate sets it."""

    def _not_with_megatron(self) -> str | None:
        stages = self.parallel.pipeline
        if self.router_replay and self.activation_checkpointing and stages > 1:
            return (
                f"router_replay, beside activation_checkpointing and parallel.pipeline = {stages}, does not "
                "go: layers are computed again when the experts of later micro-batches are known,"
            )
        return "colocated was not tried" if self.colocated else super()._not_with_megatron()

    def published_as(self, *, gpu: bool) -> str:
        """The data type in which servers get policies from a trainer on a GPU or CPU."""
        return self.precision.settled(gpu=gpu).compute if self.publish_dtype == "auto" else self.publish_dtype

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        return {"critic": AuxiliaryModel(self.critic.model, self.critic.optimizer)} if self.critic else {}

    def beginning_as(self, folders: Mapping[str, str]) -> Self:
        if self.critic is None:
            return self
        critic = self.critic.model_copy(update={"model": folders.get("critic", self.critic.model)})
        return self.model_copy(update={"critic": critic})

    @model_validator(mode="after")
    def _updates_use_all_parts(self) -> Self:
        if self.updates_per_batch % (self.mini_batches or self.updates_per_batch):
            raise ValueError(
                f"updates_per_batch = {self.updates_per_batch} is no multiple of mini_batches = "
                f"{self.mini_batches}: each part of a batch is trained on equally often"
            )
        return self

    @model_validator(mode="after")
    def _routers_can_be_replayed(self) -> Self:
        if self.router_replay and self.compile:
            raise ValueError(
                "router_replay beside compile: the experts that a compiled layer chooses can't be replaced; "
                "give one of them"
            )
        return self

    @model_validator(mode="after")
    def _the_policy_is_trained(self) -> Self:
        critic = self.critic
        if critic is None:
            return self
        if critic.warmup_steps >= self.max_steps and self.recorded_batches is None:
            raise ValueError(
                f"critic.warmup_steps = {critic.warmup_steps} leaves no step for the policy, as max_steps = "
                f"{self.max_steps}: lower it"
            )
        if problem := critic.scheduler.problem(self.max_steps, "critic.scheduler"):
            raise ValueError(problem)
        return self

    def keeps_published(self, *, gpu: bool) -> str | None:
        return self.published_as(gpu=gpu) if self.weight_encoding == "delta" else None

    @property
    def sends_adapter(self) -> bool:
        return self.lora is not None and self.lora.serve != "merged"

    @property
    def shares_gpu(self) -> bool:
        return self.colocated

    @property
    def replays_experts(self) -> bool:
        return self.router_replay

    @property
    def publishes_first(self) -> bool:
        return self.weight_transport == "store" or (self.lora is not None and self.lora.serve == "unmerged")

    @property
    def policies_url(self) -> str | None:
        """The URL below which policies are put for servers elsewhere; None: they get them in another way."""
        remote = self.ckpt.remote if self.ckpt and self.weight_transport == "store" else None
        return remote and f"{remote.rstrip('/')}/policies"

    @model_validator(mode="after")
    def _policies_can_be_sent(self) -> Self:
        if self.weight_transport == "store" and self.policies_url is None:
            raise ValueError('weight_transport = "store" needs --ckpt.remote, such as s3://bucket/run')
        if self.lora is None or not self.sends_adapter:
            return self
        if self.weight_encoding != "full":
            raise ValueError(
                f'lora.serve = "{self.lora.serve}" needs weight_encoding = "full": an adapter is small, and '
                "all of it changes"
            )
        if self.weight_transport != "files":
            raise ValueError(
                f'lora.serve = "{self.lora.serve}" needs weight_transport = "files"; over the network, '
                "and through an object store, servers get merged weights"
            )
        return self

    @field_validator("weight_host")
    @classmethod
    def _names_one_address(cls, value: str | None) -> str | None:
        if value in ("0.0.0.0", "::", ""):
            raise ValueError(
                f"{value!r} is no address that servers can connect to: give this machine's, or a server's"
            )
        return value

    @property
    def own_loss(self) -> LossConfig | None:
        """The loss, if it is the user's own class."""
        return self.loss if self.loss.is_own else None

    def problem_with_advantages(self, types: Collection[str]) -> str | None:
        """Why batches with these types of advantages can't be trained on; None if they can."""
        return critic_problem(self.critic is not None, types)
