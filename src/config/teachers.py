"""Settings of models beside the policy: a reference to stay close to, a teacher, and PPO's critic."""

from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from cairn.config.environment import GAE
from cairn.config.optimizer import AdamWConfig, OptimizerConfig, SchedulerConfig
from cairn.config.settings import BaseConfig, ExistingPath

START = "start"
"""The source that stands for the weights which the run starts from."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""The column of batches with logprobs under the reference."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""That with logprobs under the teacher."""
ONLY_AT_ONE = "a server gives logprobs of a prompt's tokens at temperature 1 only"
URLS = ("http://", "https://")


def is_served(source: str) -> bool:
    """Whether a source is the address of a server, which computes the logprobs."""
    return source.startswith(URLS)


class KLConfig(BaseConfig):
    """A penalty on the KL divergence from a reference model, which keeps the policy close to it."""

    reference: ExistingPath | None = None
    """start (the weights the run starts from), a folder, step_N, hub name, or URL of a vLLM server."""
    coef: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight of the penalty; 0 measures the divergence and changes nothing."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of each token's divergence: k1 (log ratio), k2 (its square / 2) or k3 (ratio - 1 - log ratio)."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term with a gradient; reward: subtracted from each token's advantage, without one."""
    unbiased: bool = False
    """loss: weight it by the token's ratio, gradient included; this makes k1's and k3's gradient unbiased."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.reference is None:
            raise ValueError(
                "kl needs the model that the policy stays close to: kl.reference = start (the weights that "
                "the run starts from), a folder, a step_N, a name on the hub or the URL of a vLLM server"
            )
        if self.coef is None:
            raise ValueError(
                f"kl.reference = {self.reference!r} without kl.coef has no use: give the penalty's weight, "
                "such as 0.001; 0 only measures the divergence"
            )
        if self.unbiased and self.place == "reward":
            raise ValueError("kl.unbiased is for kl.place = 'loss': in the reward there is no gradient")
        if self.unbiased and self.estimator == "k2":
            raise ValueError(
                "kl.unbiased is for k1 and k3, whose mean is the divergence; k2's is not, and its gradient "
                "is right for the policy's own samples as it is"
            )
        if self.estimator == "k1" and self.place == "loss" and not self.unbiased:
            raise ValueError(
                "kl.estimator = 'k1' with kl.place = 'loss' penalises nothing: its gradient is 0 on average. "
                "Take k2 (the divergence's gradient), k3 (that of its reverse), kl.unbiased, or "
                "kl.place = 'reward'"
            )
        return self


class DistillConfig(BaseConfig):
    """On-policy distillation: each token of the policy's own answers is rewarded by a teacher's logprob."""

    teacher: ExistingPath | None = None
    """start (the weights the run starts from), a folder, step_N, hub name, or URL of a vLLM server."""
    coef: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of teacher logprob - policy logprob, which is added to each token's advantage."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.teacher is None:
            raise ValueError(
                "distill needs a teacher: distill.teacher = a folder, a step_N, a name on the hub, the URL "
                "of a vLLM server, or start (the weights that the run starts from)"
            )
        return self


class WithTeachers(BaseConfig):
    """The settings by which other models score a trainer's batches."""

    sources_of: ClassVar[Mapping[str, str]] = {
        REFERENCE_LOGPROBS: "kl.reference",
        TEACHER_LOGPROBS: "distill.teacher",
    }
    """The setting that names the model of each column."""
    kl: KLConfig | None = None
    distill: DistillConfig | None = None

    @property
    def kl_in_loss(self) -> KLConfig | None:
        """The penalty on the divergence from a reference that is a term of the loss."""
        return self.kl if self.kl and self.kl.place == "loss" else None

    @property
    def teachers(self) -> dict[str, str]:
        """The model that fills in each column: its source, by the column's name."""
        named = {
            REFERENCE_LOGPROBS: self.kl and self.kl.reference,
            TEACHER_LOGPROBS: self.distill and self.distill.teacher,
        }
        return {column: source for column, source in named.items() if source}

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """With another source for some columns, such as the folder that a name stands for."""
        changed: dict[str, BaseConfig] = {}
        if self.kl and REFERENCE_LOGPROBS in sources:
            changed["kl"] = self.kl.model_copy(update={"reference": sources[REFERENCE_LOGPROBS]})
        if self.distill and TEACHER_LOGPROBS in sources:
            changed["distill"] = self.distill.model_copy(update={"teacher": sources[TEACHER_LOGPROBS]})
        return self.model_copy(update=changed)


# PPO's critic, and models that are trained beside the policy.


POLICY_AGAIN = "policy"
"""In the place of a model's name: another copy of the run's own."""


class AuxiliaryModel(NamedTuple):
    """A model that is trained beside the policy: its name or folder, or POLICY_AGAIN; and its optimiser."""

    model: str
    optimizer: OptimizerConfig


def critic_problem(critic: bool, types: Collection[str]) -> str | None:
    """Why a trainer with or without a critic can't train on such advantages; None if it can.

    Args:
        types: of advantages (`advantage.type`); a class of the user's own may ship rewards as `gae` does.
    """
    others = sorted(name for name in types if name != GAE and ":" not in name)
    if critic and others:
        return (
            f"trainer.critic with orchestrator.advantage.type = {others[0]!r}: a critic's values are used by "
            f"advantage.type = {GAE!r} alone; set that, or leave out the critic"
        )
    if GAE in types and not critic:
        return (
            f"orchestrator.advantage.type = {GAE!r} without trainer.critic: the advantages are computed from "
            "a critic's values; give the trainer a [critic] section (--trainer.critic), or another type"
        )
    return None


class CriticConfig(BaseConfig):
    """PPO's critic: a model that predicts the reward still to come, and is trained beside the policy."""

    model: str = POLICY_AGAIN
    """What it begins as: policy (the run's model), or a folder, a step_N folder, or a name on the hub."""
    optimizer: OptimizerConfig = AdamWConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run, in which the critic is trained and the policy is not."""
    clip: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """Change of a value within a step beyond which it earns nothing; 0: values are not clipped."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 compares rewards with values; lower ones trust values more, for less variance."""
    whiten: bool = True
    """Shift and scale the advantages of each batch to mean 0 and standard deviation 1."""
