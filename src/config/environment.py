"""Settings of environments."""

from typing import Any, ClassVar

from pydantic import Field, field_validator

from cairn.config.advantage import AdvantageConfig
from cairn.config.base import BaseConfig
from cairn.config.overlong import OverlongConfig
from cairn.config.pools import PoolsConfig
from cairn.config.sampling import checked_stop

LABEL = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
"""What a name in metrics may be."""


class EnvironmentConfig(BaseConfig):
    """Where prompts and rewards come from."""

    arguments_of: ClassVar[dict[str, str]] = {"name": "args"}
    """Another name means another environment, to which the arguments given for the first do not apply."""
    name: str = "reverse_text"
    """A built-in one, such as reverse_text, dataset, openenv or agent (see the docs), or module:Class."""
    args: dict[str, Any] = {}
    """Arguments of the environment's constructor, such as its number of problems."""
    label: str | None = Field(default=None, pattern=LABEL)
    """What messages, metrics and rollouts call it: letters, digits and _.- only (default: its name)."""

    @property
    def called(self) -> str:
        """What messages, metrics and rollouts call it."""
        return self.label or self.name


class EnvironmentSamplingConfig(BaseConfig):
    """How the answers in one of several environments are sampled."""

    unlisted = frozenset({"temperature"})
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer (default: that of the run)."""
    stop: list[str] | None = None
    """Texts at which an answer ends (default: those of the run)."""
    temperature: None = None
    """Must be left out: a batch has one temperature, sampling.temperature of the run."""

    @field_validator("stop", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> list[str] | None:
        return None if value is None else list(checked_stop(value))

    @field_validator("temperature", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> None:
        if value is not None:
            raise ValueError(
                "all environments of a run are sampled at one temperature, because the loss divides the "
                "logits of a whole batch by it: set sampling.temperature of the run"
            )


class MixedEnvironmentConfig(EnvironmentConfig):
    """One of several environments, and what is particular about its prompts."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the prompts, in relation to the weights of the other environments."""
    samples_per_prompt: int | None = Field(default=None, ge=1)
    """Answers to each of its prompts (default: that of the run)."""
    sampling: EnvironmentSamplingConfig = EnvironmentSamplingConfig()
    advantage: AdvantageConfig | None = None
    """How the answers to its prompts are compared (default: that of the run)."""
    overlong: OverlongConfig | None = None
    """What becomes of its answers that are too long (default: that of the run)."""
    pools: PoolsConfig | None = None
    """Which of its problems rest (default: as the run's settings say)."""
