"""Settings of PPO's critic, and of models that are trained beside the policy."""

from collections.abc import Collection
from typing import NamedTuple

from pydantic import Field

from cairn.config.advantage import GAE
from cairn.config.base import BaseConfig
from cairn.config.optimizer import AdamWConfig, OptimizerConfig
from cairn.config.scheduler import SchedulerConfig

POLICY_AGAIN = "policy"
"""In the place of a model's name: another copy of the run's own."""


class ModelBeside(NamedTuple):
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
